"""One engine in a process of its own that does what its parent says; both ends of that conversation.

    parent                                    child
    EngineProcess(...)              ->        loads the engine
                                    <-        {"start_s": 41.2}
    ask(num=256, tokens=256, at=t)  ->        waits until t on the host's monotonic clock, completes
                                    <-        {"began_s": t, "ended_s": ..., "cpu_s": ...}
    close()                         ->        is killed (and ends by itself if the parent is gone)

Lines of JSON, on the child's standard input and on a pipe for its answers (its output is vLLM's, and
goes to a log). All engines that are given the same `at` begin together, so the time of a case is from
`at` to the last one's end.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config import VllmEngineConfig
from asyncrl.generator.memory import GRAPH_SIZES, graph_sizes

Row = dict[str, Any]

VLLM_LARGEST_GRAPH = 512
"""Of those that vLLM captures by itself."""

VARIANTS: dict[str, tuple[Row, Row]] = {
    "base": ({}, {}),
    "fp8": ({"quantization": "fp8"}, {}),
    "sync": ({}, {"async_scheduling": False}),
    "prefill2k": ({}, {"max_num_batched_tokens": 2048}),
    "prefill16k": ({}, {"max_num_batched_tokens": 16384}),
    "graphs512": ({}, {}),
}
"""Changes of `engine.*`, and of vLLM's arguments. graphs512: no larger batches, as vLLM by itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child loads."""

    kind: str
    """"ours" or "plain"."""

    model: str
    variant: str
    engines: int
    """That share the GPU's memory."""

    max_num: int
    """Completions of one engine at the same time."""

    batches: list[int]
    """Completions of one engine in all the cases to come: only their CUDA graphs are captured."""

    prompt_tokens: int
    tokens: int
    memory: float
    eager: bool


class CaseFailedError(Exception):
    """A child ended or did not answer in time; the message says where its log is."""


class EngineProcess:
    """The parent's end."""

    def __init__(self, job: Job, log: Path, environment: dict[str, str]) -> None:
        """Start the child with these variables too; `answer` gives how long it took."""
        answers, answer = os.pipe()
        command = [sys.executable, "-m", "analysis.engine_process", "--answer", str(answer)]
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, json.dumps(dataclasses.asdict(job))],
                stdin=subprocess.PIPE, stdout=output, stderr=output, text=True,
                pass_fds=[answer], start_new_session=True, env=os.environ | environment,
            )  # fmt: skip
        os.close(answer)
        self._answers = os.fdopen(answers)

    def ask(self, **command: object) -> None:
        """Send one command."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.answer(time.monotonic() + 5)  # raises: says how it ended

    def has_answer(self, timeout_s: float) -> bool:
        """Whether an answer, or the child's end, came within that time."""
        return bool(select.select([self._answers], [], [], max(0.0, timeout_s))[0])

    def answer(self, deadline_s: float) -> Row:
        """The next answer, by `deadline_s` of the monotonic clock."""
        if not self.has_answer(deadline_s - time.monotonic()):
            raise CaseFailedError(f"no answer in time; see {self._log}")
        line = self._answers.readline()
        if not line:
            raise CaseFailedError(f"ended with exit code {self._process.wait()}; see {self._log}")
        found: Row = json.loads(line)
        return found

    def close(self) -> None:
        """End the child at once: taking an engine down in order takes seconds and frees no more."""
        with contextlib.suppress(ProcessLookupError):  # it has failed already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()


def serve(job: Job, answers: int) -> None:
    """The child's end."""
    from asyncrl.generator.engines import prepare_vllm

    began_s = time.monotonic()
    prepare_vllm()
    complete = _start(job)
    with os.fdopen(answers, "w") as out:
        out.write(json.dumps({"start_s": time.monotonic() - began_s}) + "\n")
        out.flush()
        for line in sys.stdin:
            command = json.loads(line)
            time.sleep(max(0.0, command.pop("at") - time.monotonic()))
            began_s, cpu_s = time.monotonic(), time.process_time()
            complete(**command)
            facts = {"began_s": began_s, "ended_s": time.monotonic()}
            out.write(json.dumps(facts | {"cpu_s": time.process_time() - cpu_s}) + "\n")
            out.flush()


def _start(job: Job) -> Callable[..., Any]:
    """What completes (num, tokens, ...)."""
    from analysis.bench_vllm_engine import drain
    from analysis.plain_vllm import start_plain
    from asyncrl.generator.vllm_engine import VllmEngine

    changes, more = VARIANTS[job.variant]
    config = VllmEngineConfig.model_validate(
        {
            "engines_per_gpu": job.engines,
            "max_concurrent_completions": job.max_num,
            "max_prompt_tokens": job.prompt_tokens,
            "max_completion_tokens": job.tokens,
            "gpu_memory_utilization": job.memory,
            "enforce_eager": job.eager,
        }
        | changes
    )
    more = {"load_format": "dummy", **more}
    if not job.eager:
        graphs = captured(job, config)
        more |= {"cudagraph_capture_sizes": graphs, "max_cudagraph_capture_size": graphs[-1]}
    options = argparse.Namespace(prompt_tokens=job.prompt_tokens)
    if job.kind == "plain":
        return start_plain(job.model, config, more, options)
    engine = VllmEngine(job.model, config, more_arguments=more)
    return partial(drain, engine, options=options)


def captured(job: Job, config: VllmEngineConfig) -> list[int]:
    """The largest of an engine's sizes, and those that the batches to come are padded to."""
    sizes = graph_sizes(config, job.prompt_tokens + job.tokens)
    if job.kind == "plain" or job.variant == "graphs512":
        sizes = [size for size in sizes if size <= VLLM_LARGEST_GRAPH]
    padded = {min((s for s in sizes if s >= num), default=sizes[-1]) for num in job.batches}
    return sorted(padded | {sizes[-1]})


def graphs_up_to(limit: int) -> Row:
    """EngineArgs with which no larger batch is captured; 0: as the engine does by itself."""
    sizes = [size for size in GRAPH_SIZES if size <= limit]
    return (
        {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]} if sizes else {}
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=json.loads)
    parser.add_argument("--answer", type=int, required=True)
    given = parser.parse_args()
    serve(Job(**given.job), given.answer)
