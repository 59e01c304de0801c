"""What new weights cost a vLLM engine that decodes: how long it stands still, how soon they sample.

    python analysis/bench_adoption.py --shape 1.4b --num 512 --out DIR

A second process is the learner: it holds the weights (on its GPU, if there is one), changes them, takes a
snapshot and publishes it through the real Publisher and shared memory. This process is the generator: an
engine with N completions that all have `--tokens` tokens, always refilled, the real Subscriber beside it,
and weights adopted between two steps as soon as they are staged.

| figure                    | is the time                                                            |
|---------------------------|------------------------------------------------------------------------|
| adopt_ms                  | of `Engine.adopt`: nothing is scheduled; the batch in flight is taken  |
| gap_ms                    | between the last tokens before the call and the first of the new       |
|                           | version, the batch in flight between them                              |
| stall_ms                  | gap_ms less one median step for each batch that came in it: how much   |
|                           | later than without an adoption the new tokens are                      |
| publish_to_first_token_ms | from the call of `Publisher.publish` to the first new tokens           |
| announced_ms, stage_ms    | of digesting; of mapping, copying to the GPU and checking there        |
| notice_ms, first_token_ms | until the loop asks; from the end of `Engine.adopt` to new tokens      |
| snapshot_ms               | of `Snapshotter.take`                                                  |

Tokens a second with publications are compared with those of the same engine without any; `step_ms_with`
(steps between the adoptions) tells a slower host from what publications cost.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.engine_process import graphs_up_to
from analysis.random_models import SHAPES, make_model, random_weights
from asyncrl.config import VllmEngineConfig
from asyncrl.generator.engine import SampleRequest
from asyncrl.generator.engines import prepare_vllm
from asyncrl.telemetry.provenance import provenance
from asyncrl.weights.buffers import MAX_BUFFERS, remove_leftovers
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.snapshot import Snapshotter
from asyncrl.weights.subscriber import Subscriber
from asyncrl.wire.messages import Announcement

RUN_ID = "bench-adoption-" + os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")
"""Of those that may run side by side, each with GPUs of its own."""

GROUP_SIZE = 8
Row = dict[str, Any]


def main() -> None:
    """Start the learner and the engine, measure, write."""
    options = parse()
    sys.setswitchinterval(options.switch_ms / 1e3)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "models" / options.shape
    make_model(path, options.shape)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    learner = context.Process(
        target=learn, args=(theirs, str(path), options.learner_device), daemon=True
    )
    learner.start()
    theirs.close()  # so that a learner that fails ends this process too
    record: Row = provenance() | {"options": {k: str(v) for k, v in vars(options).items()}}
    record["rows"] = []
    name = f"adoption_{options.shape}_{options.quantization}"
    for row in measure_all(options, str(path), ours):
        record["rows"].append(row)
        (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(row), flush=True)
    ours.send(None)
    learner.join(30)
    print("done", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.4b")
    parser.add_argument("--num", nargs="+", type=int, default=[512])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--publications", type=int, default=24)
    parser.add_argument("--every-s", type=float, default=1.0, help="between two publications")
    parser.add_argument("--seconds", type=float, default=8.0, help="of decoding without any, twice")
    parser.add_argument("--staging", nargs="+", choices=["gpu", "host"], default=["gpu", "host"])
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--nccl", action="store_true", help="engine.custom_all_reduce=false")
    parser.add_argument("--learner-device", default="cuda:0")
    parser.add_argument("--gpu-memory", type=float, default=0.5)
    parser.add_argument("--graphs", type=int, default=0, help="largest batch that is captured")
    parser.add_argument(
        "--switch-ms", type=float, default=5.0, help="sys.setswitchinterval, if nothing is staged"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def learn(pipe: Connection, path: str, device: str) -> None:
    """The learner: one publication for each version that comes down the pipe."""
    if not torch.cuda.is_available():
        device = "cpu"
    weights = {name: values.to(device) for name, values in random_weights(path).items()}
    publish_on_demand(pipe, weights)


def publish_on_demand(pipe: Connection, weights: dict[str, torch.Tensor]) -> None:
    """Change and publish `weights` whenever a version comes down the pipe, until None does."""
    lock = threading.Lock()

    def send(message: object) -> None:  # called from the publisher's thread as well
        with lock:
            pipe.send(message)

    remove_leftovers(RUN_ID)  # of a run that was killed
    device = next(iter(weights.values())).device
    publisher = Publisher(
        RUN_ID,
        epoch=0,
        transport="shm",
        on_published=send,
        device=device if device.type == "cuda" else None,
    )
    snapshotter = Snapshotter(weights.items(), dtype="bfloat16", buffers=publisher.buffers)
    send("ready")
    while (version := pipe.recv()) is not None:
        with torch.no_grad():
            for values in weights.values():
                values.mul_(1.0 + 2**-6)  # more than bfloat16's spacing
        began_s = time.monotonic()
        snapshot = snapshotter.take(version)
        taken_s = time.monotonic()
        assert snapshot is not None
        publisher.publish(snapshot)
        send(("published", version, began_s, taken_s))
    publisher.close()


def measure_all(options: argparse.Namespace, path: str, pipe: Connection) -> Iterator[Row]:
    """Every number in flight with every way of staging, on one engine."""
    config = VllmEngineConfig(
        max_concurrent_completions=max(options.num),
        max_prompt_tokens=options.prompt_tokens,
        max_completion_tokens=options.tokens,
        gpu_memory_utilization=options.gpu_memory,
        quantization=options.quantization,
        tensor_parallel_size=options.tensor_parallel,
        custom_all_reduce=not options.nccl,
    )
    more: Row = {"load_format": "dummy", **graphs_up_to(options.graphs)}
    prepare_vllm(config)
    from asyncrl.generator.vllm_engine import VllmEngine

    engine = VllmEngine(path, config, more_arguments=more)
    assert pipe.recv() == "ready"
    for staging in options.staging:
        way = engine.staging() if staging == "gpu" else None
        if staging == "gpu" and way is None:
            continue
        subscriber = Subscriber(RUN_ID, staging=way)
        for num in options.num:
            bench = Bench(options, engine, subscriber, pipe, num)
            yield {"staging": staging, "num": num} | bench.run()
        subscriber.close()
    print("closing", flush=True)
    engine.close()


class Bench:
    """One generator loop with N in flight."""

    def __init__(
        self,
        options: argparse.Namespace,
        engine: Any,  # noqa: ANN401  (VllmEngine, which cannot be imported where vllm is not)
        subscriber: Subscriber,
        pipe: Connection,
        num: int,
    ) -> None:
        self._options = options
        self._engine = engine
        self._subscriber = subscriber
        self._pipe = pipe
        self._num = num
        self._next_id = 0
        self._draws = np.random.default_rng(0)
        self._version = engine.version
        self._delivered_s = 0.0
        self._num_delivered = 0
        poll = engine._core.poll

        def timed_poll() -> list[Any]:
            outputs: list[Any] = poll()
            if outputs:
                self._delivered_s = time.monotonic()
                self._num_delivered += 1
            return outputs

        engine._core.poll = timed_poll
        self._heard: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        self._done = threading.Event()
        self._ear = threading.Thread(target=self._hear, daemon=True)
        self._ear.start()

    def _hear(self) -> None:
        """As the mailbox's thread does: an announced version is fetched at once."""
        with contextlib.suppress(EOFError):  # a learner that failed has said why
            while not self._done.is_set():
                if not self._pipe.poll(0.1):
                    continue
                message = self._pipe.recv()
                if isinstance(message, Announcement):
                    self._subscriber.start(message)
                self._heard.put((time.monotonic(), message))

    def run(self) -> Row:
        """Warm up (the first adoption tries ways of loading, the first of each file pins it); measure."""
        self._decode(publications=MAX_BUFFERS + 1, record=[])
        plain = self._decode(seconds=self._options.seconds)
        rows: list[Row] = []
        published = self._decode(publications=self._options.publications, record=rows)
        again = self._decode(seconds=self._options.seconds)
        for request_id in range(self._next_id):
            self._engine.abort(request_id)
        self._done.set()
        self._ear.join()
        undisturbed = statistics.median([plain["tokens_per_s"], again["tokens_per_s"]])
        lost_s = published["seconds"] * (1 - published["tokens_per_s"] / undisturbed)
        result: Row = {
            "num_publications": len(rows),
            "step_ms": plain["step_ms"],
            "step_ms_with": published["step_ms"],
            "step_ms_after": again["step_ms"],
            "tokens_per_s_without": [plain["tokens_per_s"], again["tokens_per_s"]],
            "tokens_per_s_with": published["tokens_per_s"],
            "lost_ms_each": 1e3 * lost_s / len(rows),
        }
        for key in rows[0]:
            values = [row[key] for row in rows]
            result[f"{key}_p50"], result[f"{key}_p95"] = np.quantile(values, [0.5, 0.95]).tolist()
        return result

    def _refill(self) -> None:
        while self._engine.num_unfinished + GROUP_SIZE <= self._num:
            # Lengths differ, so that completions do not all end in the same step.
            tokens = int(self._draws.integers(self._options.tokens // 2, self._options.tokens + 1))
            prompt = self._draws.integers(0, 256, self._options.prompt_tokens).astype(np.int32)
            self._engine.submit(
                SampleRequest(
                    request_id=self._next_id,
                    prompt_tokens=prompt,
                    num_completions=GROUP_SIZE,
                    seed=self._next_id,
                    max_tokens=tokens,
                )
            )
            self._next_id += 1

    def _decode(
        self, *, seconds: float = 0.0, publications: int = 0, record: list[Row] | None = None
    ) -> Row:
        """Decode for some time, or until so many versions were published and adopted."""
        rows = [] if record is None else record
        steps: list[float] = []
        num_tokens, began_s = 0, time.monotonic()
        asked_s = began_s  # steps are measured before anything is published
        facts: Row = {}
        while True:
            now_s = time.monotonic()
            if publications and not facts and len(rows) == publications:
                break
            if not publications and now_s - began_s > seconds:
                break
            if publications and not facts and now_s - asked_s > self._options.every_s:
                self._version += 1
                self._pipe.send(self._version)
                facts, asked_s = {"version": self._version}, now_s
            self._listen(facts)
            self._refill()
            self._adopt(facts)
            started_s, num_delivered = self._delivered_s, self._num_delivered
            num_tokens += sum(len(c.tokens) for c in self._engine.step())
            if facts.get("adopted") and self._samples_new():
                rows.append(self._row(facts, steps))
                facts = {}
            elif self._num_delivered == num_delivered + 1 and not facts.get("adopted"):
                steps.append(self._delivered_s - started_s)
        took_s = time.monotonic() - began_s
        return {
            "seconds": took_s,
            "tokens_per_s": num_tokens / took_s,
            "step_ms": 1e3 * statistics.median(steps),
        }

    def _samples_new(self) -> bool:
        rows = self._engine._rows.values()
        return any(row.starts and row.starts[-1][0] == self._engine.version for row in rows)

    def _listen(self, facts: Row) -> None:
        while not self._heard.empty():
            match self._heard.get():
                case (_, ("published", _, began_s, taken_s)):
                    facts |= {"began_s": began_s, "taken_s": taken_s}
                case (heard_s, _):
                    facts["announced_s"] = heard_s

    def _adopt(self, facts: Row) -> None:
        staged = self._subscriber.ready()
        if staged is None:
            return
        facts |= {"delivered_s": self._delivered_s, "num_delivered": self._num_delivered}
        began_s = time.monotonic()
        self._engine.adopt(staged.version, staged.tensors(), file=staged.file)
        facts |= {
            "adopted": True,
            "staged_s": staged.end_s,
            "stage_s": staged.end_s - staged.start_s,
            "notice_s": began_s - staged.end_s,
        }
        facts["adopt_s"] = time.monotonic() - began_s
        facts["ended_s"] = time.monotonic()
        staged.release()

    def _row(self, facts: Row, steps: list[float]) -> Row:
        now_s = time.monotonic()
        step_ms = 1e3 * statistics.median(steps[-200:])
        gap_ms = 1e3 * (self._delivered_s - facts["delivered_s"])
        return {
            "stall_ms": gap_ms - step_ms * (self._num_delivered - facts["num_delivered"]),
            "gap_ms": gap_ms,
            "adopt_ms": 1e3 * facts["adopt_s"],
            "publish_to_first_token_ms": 1e3 * (now_s - facts["taken_s"]),
            "snapshot_ms": 1e3 * (facts["taken_s"] - facts["began_s"]),
            "announced_ms": 1e3 * (facts["announced_s"] - facts["taken_s"]),
            "stage_ms": 1e3 * facts["stage_s"],
            "notice_ms": 1e3 * facts["notice_s"],
            "first_token_ms": 1e3 * (now_s - facts["ended_s"]),
        }


if __name__ == "__main__":
    main()
