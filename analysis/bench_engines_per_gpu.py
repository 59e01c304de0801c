"""Sampled tokens a second of 1 to E vLLM engines on one GPU, each in a process of its own.

    python analysis/bench_engines_per_gpu.py --shapes 135m 1.4b --engines 1 3 4 --num 1024 --out DIR

One engine is bound by its host loop, so several share a GPU: N completions are split evenly among
them, all engines start, wait for each other, and then sample for the same `--seconds`: each submits its
share again as soon as it is drained. The rate is all tokens that came out in that window over its length.
DIR/engines_per_gpu.json holds every case with provenance.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_vllm_engine import submit
from random_models import SHAPES, make_model

from asyncrl.config import VllmEngineConfig
from asyncrl.generator.engines import prepare_vllm
from asyncrl.telemetry.provenance import provenance

_STAGGER_S = 2.0


def main() -> None:
    """Every case in turn, then the table."""
    options = parse()
    if options.child >= 0:
        run_engine(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    head = provenance() | {"options": {k: str(v) for k, v in vars(options).items()}}
    cases: list[dict[str, Any]] = []
    for shape in options.shapes:
        make_model(options.out / "models" / shape, shape)
        for engines in options.engines:
            cases.append(run_case(options, shape, engines))
            print(cases[-1], flush=True)
            whole = json.dumps(head | {"cases": cases}, indent=1)
            (options.out / "engines_per_gpu.json").write_text(whole + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "1.4b"])
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--num", type=int, default=1024, help="completions in flight, all engines")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--memory", type=float, default=0.85, help="of the GPU, all engines")
    parser.add_argument("--limit-s", type=float, default=200.0, help="of one case")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--shape", default="", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_case(options: argparse.Namespace, shape: str, engines: int) -> dict[str, Any]:
    """Start the engines, let them go together, add up what came out."""
    folder = options.out / f"{shape}-{engines}"
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    processes = []
    for index in range(engines):
        command = [
            sys.executable, *sys.argv, "--child", str(index), "--shape", shape,
            "--share", str(engines),
        ]  # fmt: skip
        log = (folder / f"{index}.log").open("w")
        processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        time.sleep(_STAGGER_S)
    deadline = time.monotonic() + options.limit_s
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        if len(list(folder.glob("*.ready"))) == engines and not (folder / "go").exists():
            started_s = time.monotonic() - began
            (folder / "go").touch()
        time.sleep(0.05)
    for process in processes:
        process.kill()
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    case: dict[str, Any] = {"shape": shape, "engines": engines, "num": options.num}
    if len(found) < engines:
        return case | {"failed": [p.returncode for p in processes]}
    return case | {
        "tokens_per_s": round(sum(f["tokens"] / f["seconds"] for f in found)),
        "start_s": round(started_s, 1),
        "each": found,
    }


def run_engine(options: argparse.Namespace) -> None:
    """One engine: ready, wait for go, sample for the given time."""
    prepare_vllm()
    from asyncrl.generator.vllm_engine import VllmEngine

    share = options.num // options.share
    config = VllmEngineConfig(
        max_concurrent_completions=share,
        max_prompt_tokens=options.prompt_tokens,
        max_completion_tokens=options.tokens,
        gpu_memory_utilization=options.memory / options.share,
        enforce_eager=options.eager,
    )
    model = str(options.out / "models" / options.shape)
    # A fixed cache: measuring free memory while the neighbours start would count theirs.
    cache = {"kv_cache_memory_bytes": 4 * 2**30} if not options.eager else {}
    engine = VllmEngine(model, config, more_arguments={"load_format": "dummy", **cache})
    submit(engine, share, 8, options)
    while engine.num_unfinished:
        engine.step()
    folder = options.out / f"{options.shape}-{options.share}"
    (folder / f"{options.child}.ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    began, tokens = time.monotonic(), 0
    while time.monotonic() - began < options.seconds:
        if not engine.num_unfinished:
            submit(engine, share, options.tokens, options)
        tokens += sum(len(c.tokens) for c in engine.step())
    seconds = time.monotonic() - began
    # Completions that are still running have tokens, too, that nobody counted yet.
    for request in {row.request.request_id for row in engine._rows.values()}:
        tokens += sum(len(c.tokens) for c in engine.abort(request))
    result = {"tokens": tokens, "seconds": seconds}
    (folder / f"{options.child}.json").write_text(json.dumps(result) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
