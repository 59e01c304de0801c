"""Adapters in a vLLM engine that decodes: pinned versions beside merged ones and beside no adapter.

    python analysis/bench_lora_adoption.py --shape 1.4b --num 512 --limit-s 170 --out DIR

Every case is a process of its own with a time limit; what it measured so far is in DIR/<case>.json. As in
bench_adoption.py, a second process is the learner and publishes through the real Publisher and shared
memory, here an adapter of all linear modules; this one is the generator with N completions, always
refilled, the real Subscriber, and versions adopted between two steps. The figures are defined there.

| case   | engine                                                                  | measures           |
|--------|-------------------------------------------------------------------------|--------------------|
| none   | without an adapter                                                      | tokens a second    |
| pinned | every version an adapter of its own (lora.serving)                      | both               |
| merged | the adapter merged into the weights, the base kept beside               | both               |

Of pinned versions, `stall_ms` is of the tokens of the new version, and `running_gap_ms` of everybody's:
the longest time between two deliveries of tokens around the adoption, less a median step; to be read
beside `any_gap_ms_p95`, the same of all steps, prefills of refilled groups included. Only completions
that start then sample under a pinned version: `start_ms` is how long none did. A completion
must not outlive max_staleness publications, or new versions wait (vllm_lora.py): keep
tokens * step time < max_staleness * every_s.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from analysis.bench_adoption import RUN_ID, Bench, Row, publish_on_demand
from analysis.engine_process import graphs_up_to
from analysis.random_models import SHAPES, make_model, random_weights
from asyncrl.config import LoraConfig, VllmEngineConfig
from asyncrl.generator.engines import prepare_vllm
from asyncrl.generator.merge import AdapterOffer
from asyncrl.generator.model_facts import describe_model
from asyncrl.telemetry.provenance import provenance
from asyncrl.weights.subscriber import Subscriber

CASES = ("none", "pinned", "merged")


def main() -> None:
    """Run every case in a process of its own, then print what they found."""
    options = parse()
    if options.case:
        run_case(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "models" / options.shape
    make_model(path, options.shape)
    if "merged" in options.cases:  # the only one that reads them
        save_file(random_weights(str(path)), path / "model.safetensors", {"format": "pt"})
    head = provenance() | {"options": {k: str(v) for k, v in vars(options).items()}}
    cases: list[Row] = []
    for case in options.cases:
        cases.append(spawn(options, case))
        if cases[-1]["ended"] == "exit code 1":  # 0.26 fails now and then, capturing graphs
            cases.append(spawn(options, case))
        whole = json.dumps(head | {"cases": cases}, indent=1)
        (options.out / f"lora_adoption_{options.shape}.json").write_text(whole + "\n")
        print(json.dumps(cases[-1]), flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.4b")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--num", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-staleness", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--publications", type=int, default=24)
    parser.add_argument("--every-s", type=float, default=1.0, help="between two publications")
    parser.add_argument("--seconds", type=float, default=8.0, help="of decoding without any, twice")
    parser.add_argument("--learner-device", default="cuda:0")
    parser.add_argument("--gpu-memory", type=float, default=0.5)
    parser.add_argument("--graphs", type=int, default=0, help="largest batch that is captured")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--limit-s", type=float, default=170.0, help="of one case")
    parser.add_argument(
        "--switch-ms", type=float, default=5.0, help="sys.setswitchinterval, if nothing is staged"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def spawn(options: argparse.Namespace, case: str) -> Row:
    """Run one case in a new process; what it wrote, and how it ended."""
    command = [sys.executable, *sys.argv, "--case", case]
    log, written = (options.out / f"{case}.{ending}" for ending in ("log", "json"))
    written.unlink(missing_ok=True)
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, timeout=options.limit_s, stdout=output, stderr=output, check=False
            )
            ended = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {options.limit_s:g} s"
    if ended != "exit code 0":
        print("  " + "\n  ".join(log.read_text().splitlines()[-8:]))
    result: Row = json.loads(written.read_text()) if written.exists() else {}
    return {"case": case, "ended": ended} | result


def lora_of(options: argparse.Namespace, case: str) -> LoraConfig:
    """The section `lora` of a case."""
    if case == "none":
        return LoraConfig()
    return LoraConfig.model_validate({"rank": options.rank, "serving": case})


def learn(pipe: Connection, path: str, device: str, rank: int) -> None:
    """The learner: a random adapter, published whenever it is asked for."""
    if not torch.cuda.is_available():
        device = "cpu"
    facts = describe_model(path)
    generator = torch.Generator().manual_seed(0)
    shapes = AdapterOffer(facts.state, facts.linear, LoraConfig(rank=rank)).zeros()
    weights = {
        name: (torch.randn(like.shape, generator=generator) * 0.02).to(device, torch.bfloat16)
        for name, like in shapes.items()
    }
    pipe.send(sum(values.nbytes for values in weights.values()))
    publish_on_demand(pipe, weights)


def run_case(options: argparse.Namespace) -> None:
    """One case, in this process; what is known is written as it comes."""
    sys.setswitchinterval(options.switch_ms / 1e3)
    path = str(options.out / "models" / options.shape)
    found: Row = {}

    def note(row: Row) -> None:
        found.update(row)
        (options.out / f"{options.case}.json").write_text(json.dumps(found) + "\n")

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    learner = None
    if options.case != "none":
        arguments = (theirs, path, options.learner_device, options.rank)
        context = multiprocessing.get_context("spawn")
        learner = context.Process(target=learn, args=arguments, daemon=True)
        learner.start()
        theirs.close()  # so that a learner that fails ends this process too
        note({"publication_bytes": ours.recv()})
        assert ours.recv() == "ready"
    measure(options, path, ours, found, note)
    if learner is not None:
        ours.send(None)
        learner.join(30)


def measure(
    options: argparse.Namespace,
    path: str,
    pipe: Connection,
    found: Row,
    note: Callable[[Row], None],
) -> None:
    """Start the engine of a case and decode, with and without publications; `note` adds to `found`."""
    config = VllmEngineConfig(
        max_concurrent_completions=options.num,
        max_prompt_tokens=options.prompt_tokens,
        max_completion_tokens=options.tokens,
        gpu_memory_utilization=options.gpu_memory,
        enforce_eager=options.eager,
    )
    began_s = time.monotonic()
    prepare_vllm()
    from asyncrl.generator.vllm_engine import VllmEngine

    engine = VllmEngine(
        path,
        config,
        lora=lora_of(options, options.case),
        max_staleness=options.max_staleness,
        more_arguments={"load_format": "dummy"} | graphs_up_to(options.graphs),
    )
    note({"start_s": time.monotonic() - began_s})
    subscriber = Subscriber(RUN_ID, staging=engine.staging())
    bench = LoraBench(options, engine, subscriber, pipe)
    note(bench.undisturbed(options.seconds) if options.case == "none" else bench.run())
    note({"any_gap_ms_p95": bench.any_gap_ms(0.95) - found["step_ms"]})
    subscriber.close()
    engine.close()


class LoraBench(Bench):
    """The generator loop, which also notes when anybody's tokens were delivered."""

    def __init__(
        self,
        options: argparse.Namespace,
        engine: Any,  # noqa: ANN401  (VllmEngine, which cannot be imported where vllm is not)
        subscriber: Subscriber,
        pipe: Connection,
    ) -> None:
        super().__init__(options, engine, subscriber, pipe, options.num)
        self._deliveries: list[float] = []
        poll = engine._core.poll

        def noting_poll() -> list[Any]:
            outputs: list[Any] = poll()
            if outputs:
                self._deliveries.append(time.monotonic())
            return outputs

        engine._core.poll = noting_poll
        self._added_s = 0.0
        add = engine._core.add

        def noting_add(*arguments: Any, **more: Any) -> Any:  # noqa: ANN401
            if not self._added_s:
                self._added_s = time.monotonic()
            return add(*arguments, **more)

        engine._core.add = noting_add

    def undisturbed(self, seconds: float) -> Row:
        """Tokens a second without publications, in three pieces after a warm-up."""
        self._decode(seconds=seconds / 3)
        pieces = [self._decode(seconds=seconds / 3) for _ in range(3)]
        return {
            "tokens_per_s_without": [piece["tokens_per_s"] for piece in pieces],
            "step_ms": statistics.median(piece["step_ms"] for piece in pieces),
        }

    def any_gap_ms(self, quantile: float) -> float:
        """A quantile of the times between two deliveries, over everything decoded so far."""
        return 1e3 * float(np.quantile(np.diff(self._deliveries), quantile))

    def _adopt(self, facts: Row) -> None:
        before = len(self._deliveries)
        super()._adopt(facts)
        if facts.get("adopted") and "deliveries_before" not in facts:
            facts["deliveries_before"] = before
            self._added_s = 0.0

    def _row(self, facts: Row, steps: list[float]) -> Row:
        times = self._deliveries[max(0, facts["deliveries_before"] - 1) :]
        longest_s = max(after - before for before, after in pairwise(times))
        step_s = statistics.median(steps[-200:])
        row = super()._row(facts, steps) | {"running_gap_ms": 1e3 * (longest_s - step_s)}
        if self._options.case == "pinned":
            row["start_ms"] = 1e3 * (self._added_s - facts["ended_s"])
        return row


if __name__ == "__main__":
    main()
