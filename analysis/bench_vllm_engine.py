"""Sampled tokens a second of the vLLM engine beside plain `LLM.generate`, and what an adoption costs.

    python analysis/bench_vllm_engine.py --shapes 135m 1.4b --num 64 256 512 1024 --out DIR

Every case is a process of its own with a time limit; what it measured so far is in DIR/<case>.json
even if it was stopped. Models have random weights (load_format="dummy") and no end token, so that
every completion has `--tokens` tokens and all cases do equal work: N completions, 8 of each prompt,
seeded, temperature 1, with the log-prob of every sampled token.

| case     | measures, per N                                                                        |
|----------|----------------------------------------------------------------------------------------|
| plain    | `LLM.generate(logprobs=0, flat_logprobs)`: all N at once, wall time of the call         |
| both     | one engine, driven in turns by our loop and as `LLM.generate` drives it (add_request,   |
|          | step): A, B, A, B on the same graphs and the same host                                  |
| engine   | `VllmEngine`: submit all, `step` until none is left                                     |
| keep, recompute | adoptions every `--every` steps while N decode: seconds of `adopt` (p50, p95), and  |
|          | the wall time that each adds to the whole run, re-prefill included                      |

Run it from the top folder, with PYTHONPATH=. and wherever vllm is. "host us" is processor time of
the process for one token: what is left when a busy machine stretches the wall clock. The last thing
printed is a table; DIR/bench_vllm_engine.json holds everything with its provenance.
"""

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.engine_process import graphs_up_to
from analysis.plain_vllm import GROUP_SIZE, drain_plain, prompts, start_plain
from analysis.random_models import SHAPES, make_model, random_weights
from asyncrl.config import VllmEngineConfig
from asyncrl.generator.engine import Engine, SampleRequest
from asyncrl.generator.engines import prepare_vllm
from asyncrl.telemetry.provenance import provenance

Row = dict[str, Any]


CASES = ("plain", "engine", "both", "keep", "recompute")


def main() -> None:
    """Run every case in a process of its own, then print the table."""
    options = parse()
    if options.case:
        run_case(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    head = provenance() | {"options": {k: str(v) for k, v in vars(options).items()}}
    cases: list[Row] = []
    for shape in options.shapes:
        make_model(options.out / "models" / shape, shape)
        for case in options.cases:
            cases.append(spawn(options, shape, case))
            whole = json.dumps(head | {"cases": cases}, indent=1)
            (options.out / "bench_vllm_engine.json").write_text(whole + "\n")
    print(table(cases))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "1.4b"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--num", nargs="+", type=int, default=[64, 256, 512, 1024])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--every", type=int, default=20, help="steps between two adoptions")
    parser.add_argument("--sources", nargs="+", default=["host", "pinned", "device"])
    parser.add_argument("--graphs", type=int, default=0, help="largest batch that is captured")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", action="store_true", help="host profile of the largest N")
    parser.add_argument("--limit-s", type=float, default=240.0, help="of one case")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def spawn(options: argparse.Namespace, shape: str, case: str) -> Row:
    """Run one case in a new process; what it wrote, and how it ended."""
    started = time.monotonic()
    command = [sys.executable, *sys.argv, "--case", f"{shape}/{case}"]
    log, written = (options.out / f"{shape}-{case}.{ending}" for ending in ("log", "json"))
    written.unlink(missing_ok=True)
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, timeout=options.limit_s, stdout=output, stderr=output, check=False
            )
            ended = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {options.limit_s:g} s"
    result = json.loads(written.read_text()) if written.exists() else {"rows": []}
    result |= {"shape": shape, "case": case, "ended": ended}
    print(
        f"{shape} {case}: {ended} in {time.monotonic() - started:.0f} s, {len(result['rows'])} rows"
    )
    if ended != "exit code 0":
        print("  " + "\n  ".join(log.read_text().splitlines()[-8:]))
    return result


def run_case(options: argparse.Namespace) -> None:
    """One case, in this process; rows are written as they come."""
    shape, case = options.case.split("/")
    path = str(options.out / "models" / shape)
    rows: list[Row] = []

    def record(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)
        written = options.out / f"{shape}-{case}.json"
        written.write_text(json.dumps({"start_s": start_s, "rows": rows}) + "\n")

    more: Row = {"load_format": "dummy", **graphs_up_to(options.graphs)}
    config = VllmEngineConfig(
        max_concurrent_completions=max(options.num),
        max_prompt_tokens=options.prompt_tokens,
        max_completion_tokens=options.tokens,
        cache_policy="recompute" if case == "recompute" else "keep",
        enforce_eager=options.eager,
    )
    prepare_vllm()
    began = time.monotonic()
    if case == "plain":
        generate = start_plain(path, config, more, options)
        start_s = time.monotonic() - began
        measure(generate, options, record)
        return
    from asyncrl.generator.vllm_engine import VllmEngine

    engine = VllmEngine(path, config, more_arguments=more)
    start_s = time.monotonic() - began
    ours = partial(drain, engine, options=options)
    if case == "engine":
        measure(ours, options, record)
    elif case == "both":
        plain = partial(drain_plain, engine, options=options)
        for _ in range(2):
            measure(ours, options, lambda row: record({"driver": "ours"} | row))
            measure(plain, options, lambda row: record({"driver": "plain"} | row))
    else:
        for source, tensors in sources(path, options.sources).items():
            engine.adopt(engine.version + 1, tensors.items())  # the first one warms up
            for num in options.num:
                row = {"source": source} | measure_adoptions(engine, tensors, num, options)
                record(row)
    engine.close()


def measure(
    generate: Callable[[int, int], float],
    options: argparse.Namespace,
    record: Callable[[Row], None],
) -> None:
    """Tokens a second of each N: median and best of the repeats, after one short warm-up."""
    for num in options.num:
        generate(num, 8)
        total = num * options.tokens
        host_s = time.process_time()
        rates = [total / generate(num, options.tokens) for _ in range(options.repeats)]
        host_s = (time.process_time() - host_s) / (total * options.repeats)
        record(
            {"num": num, "tokens_per_s": statistics.median(rates), "best": max(rates)}
            | {"rates": rates, "host_s_per_token": host_s}
        )
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(generate, max(options.num), options.tokens)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def submit(engine: Engine, num: int, tokens: int, options: argparse.Namespace) -> None:
    """Queue N completions."""
    for i, prompt in enumerate(prompts(num, options)):
        size = min(GROUP_SIZE, num - i * GROUP_SIZE)
        engine.submit(
            SampleRequest(
                request_id=i, prompt_tokens=prompt, num_completions=size, seed=i, max_tokens=tokens
            )
        )


def drain(engine: Engine, num: int, tokens: int, options: argparse.Namespace) -> float:
    """Seconds from submitting N completions to the last one's end."""
    began = time.perf_counter()
    submit(engine, num, tokens, options)
    completions = []
    while engine.num_unfinished:
        completions += engine.step()
    seconds = time.perf_counter() - began
    assert sum(len(c.behaviour_logprobs) for c in completions) == num * tokens
    return seconds


def measure_adoptions(
    engine: Engine, tensors: dict[str, torch.Tensor], num: int, options: argparse.Namespace
) -> Row:
    """One run of N with adoptions beside the better of two without."""
    drain(engine, num, 8, options)
    undisturbed_s = min(drain(engine, num, options.tokens, options) for _ in range(2))
    stalls = []
    began = time.perf_counter()
    submit(engine, num, options.tokens, options)
    for step in itertools.count(1):
        engine.step()
        if not engine.num_unfinished:
            break
        if step % options.every == 0:
            before = time.perf_counter()
            engine.adopt(engine.version + 1, tensors.items())
            stalls.append(time.perf_counter() - before)
    added_s = time.perf_counter() - began - undisturbed_s
    p50, p95 = np.quantile(stalls, [0.5, 0.95])
    return {
        "num": num, "num_adoptions": len(stalls), "stall_p50_s": p50, "stall_p95_s": p95,
        "added_s_each": added_s / len(stalls), "step_s": undisturbed_s / options.tokens,
        "num_bytes": sum(values.nbytes for values in tensors.values()),
    }  # fmt: skip


def sources(path: str, wanted: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """A version of the model in each kind of memory that is wanted and there."""
    host = random_weights(path)
    found = {"host": host}
    if torch.cuda.is_available():
        found["pinned"] = {name: values.pin_memory() for name, values in host.items()}
        found["device"] = {name: values.cuda() for name, values in host.items()}
    return {source: tensors for source, tensors in found.items() if source in wanted}


def table(cases: list[Row]) -> str:
    """Two short tables."""
    lines = [
        f"{'shape':6} {'case':9} {'N':>5} {'tok/s':>8} {'best':>8} {'host us':>8} {'start s':>8}"
    ]
    stalls = [
        f"{'shape':6} {'policy':9} {'from':7} {'N':>5} {'p50 ms':>8} {'p95 ms':>8} {'added ms':>9}"
    ]
    for case in cases:
        for row in case["rows"]:
            where = f"{case['shape']:6} {row.get('driver', case['case']):9}"
            if "tokens_per_s" in row:
                lines.append(
                    f"{where} {row['num']:5} {row['tokens_per_s']:8.0f} {row['best']:8.0f} "
                    f"{row['host_s_per_token'] * 1e6:8.1f} {case['start_s']:8.0f}"
                )
            else:
                times = [row[key] * 1e3 for key in ("stall_p50_s", "stall_p95_s", "added_s_each")]
                stalls.append(
                    f"{where} {row['source']:7} {row['num']:5} {times[0]:8.1f} {times[1]:8.1f} "
                    f"{times[2]:9.1f}"
                )
    return "\n".join([*lines, "", *stalls])


if __name__ == "__main__":
    main()
