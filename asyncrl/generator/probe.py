"""Measures what `choice.py` needs: decode steps of one engine alone with C, C/2, C/3 and C/4 completions.

    load     the engine of the run but with random weights, and only the CUDA graphs that are needed
    fill     prompts of random tokens, one for each group, and behind them a request of a single token:
             when that comes back, all of them have been read
    time     decode steps by the clock, log-probs on, as in a run
    profile  more steps under torch.profiler: the GPU was busy for the union of its kernels' times

Prompts are as long as a completion's context is in the middle of it, MAX_CONTEXT at most. Nothing of the
engine outlives this process, so it runs in one of its own (`asyncrl probe`).
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from asyncrl.config import LoraConfig, RunConfig, VllmEngineConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.choice import COUNTS, Choice, Option, choose, rows_each, table
from asyncrl.generator.engine import Engine, SampleRequest
from asyncrl.generator.engines import prepare_vllm
from asyncrl.generator.hf_model import choose_device, choose_dtype
from asyncrl.generator.memory import LARGEST_GRAPH, NO_LORA, divide, prefill_tokens
from asyncrl.generator.model_facts import ModelFacts, describe_model

MAX_CONTEXT = 1024
"""Longer prompts would take longer to read than all steps; the GPU's part is then measured too small."""

SETTLE_STEPS, TIMED_STEPS, PROFILED_STEPS = 4, 24, 12
_TIMED_S = 10.0
"""Fewer steps are timed if they take longer in all."""


def run(
    config: RunConfig, *, num_cores: int, record: Path | None, say: Callable[[str], None]
) -> None:
    """Measure, say the table and the choice, and write it to `record`.

    Args:
        config: the run; engine.engines_per_gpu is not looked at.
        num_cores: cores that the engines of one place have to themselves.
        record: file for `Choice.record`, or None.
        say: prints.

    Raises:
        ConfigError: not vLLM, or its engine cannot start.
    """
    began_s = time.monotonic()
    choice = probe(config, num_cores=num_cores)
    say(table(choice.options))
    say(choice.sentence)
    if record is not None:
        seconds = {"seconds": time.monotonic() - began_s}
        record.write_text(json.dumps(choice.record() | seconds, indent=1) + "\n")


def probe(config: RunConfig, *, num_cores: int) -> Choice:
    """See `run`."""
    engine = config.engine
    if not isinstance(engine, VllmEngineConfig):
        raise ConfigError(
            f"engine.kind={engine.kind!r} has one engine at each place; engines are only counted with "
            "engine.kind='vllm'"
        )
    prepare_vllm()
    model = describe_model(config.model.path)
    blank = [Option(engines=n, rows=rows_each(config, n)) for n in COUNTS]
    obstacle_to = partial(
        obstacle,
        engine,
        model,
        num_cores=num_cores,
        lora=config.lora,
        max_staleness=config.pipeline.max_staleness,
    )
    obstacles = {option.engines: obstacle_to(option) for option in blank}
    rows = {n: o.rows for n, o in zip(COUNTS, blank, strict=True) if not obstacles[n]}
    steps = measure(config, model, rows.values())
    options = []
    for option in blank:
        wall_s, busy_s = steps.get(rows.get(option.engines, 0), (0.0, 0.0))
        why = obstacles[option.engines]
        if option.engines > 1 and not why and not busy_s:
            why = "torch.profiler saw nothing of this GPU"
        options.append(
            Option(
                engines=option.engines,
                rows=option.rows,
                wall_s=wall_s,
                busy_s=busy_s,
                obstacle=why,
            )
        )
    return choose(options)


def obstacle(
    engine: VllmEngineConfig,
    model: ModelFacts,
    option: Option,
    *,
    num_cores: int,
    lora: LoraConfig = NO_LORA,
    max_staleness: int = 0,
) -> str:
    """Why a place cannot have that many engines; empty if it can."""
    if option.engines == 1:
        return ""
    if not torch.cuda.is_available():
        return "without a GPU they would take each other's cores"
    if engine.tensor_parallel_size > 1:
        return (
            "the GPU time of an engine of several processes (engine.tensor_parallel_size="
            f"{engine.tensor_parallel_size}) cannot be measured"
        )
    if option.engines > num_cores:
        return f"a place has {num_cores} cores, and every engine's host loop needs one"
    changes = {
        "engines_per_gpu": option.engines,
        "max_concurrent_completions": option.rows,
    }
    dtype = choose_dtype(engine.dtype, choose_device("auto"))
    _, total_bytes = torch.cuda.mem_get_info()
    try:
        changed = engine.model_copy(update=changes)
        divide(
            changed, model, dtype, total_bytes=total_bytes, lora=lora, max_staleness=max_staleness
        )
    except ConfigError as error:
        return str(error)
    return ""


def measure(
    config: RunConfig, model: ModelFacts, rows: Iterable[int]
) -> dict[int, tuple[float, float]]:
    """Seconds of a decode step, and of the GPU's work in it, by number of completions."""
    from asyncrl.generator.vllm_engine import VllmEngine

    sizes = sorted(set(rows), reverse=True)
    settings = config.engine
    assert isinstance(settings, VllmEngineConfig), "checked by the caller"
    context = min(MAX_CONTEXT, settings.max_prompt_tokens + settings.max_completion_tokens // 2)
    largest = settings.model_copy(update={"max_concurrent_completions": sizes[0] + 1})
    num_steps = math.ceil((sizes[0] + 1) * context / prefill_tokens(largest, context))
    num_steps += 2 + SETTLE_STEPS + TIMED_STEPS + PROFILED_STEPS
    context = max(1, min(context, model.num_positions - num_steps))
    changes = {
        "engines_per_gpu": 1,
        "max_concurrent_completions": sizes[0] + 1,
        "max_prompt_tokens": context,
        "max_completion_tokens": num_steps,
    }
    more: dict[str, object] = {"load_format": "dummy"}
    if torch.cuda.is_available():
        more["max_num_batched_tokens"] = prefill_tokens(largest, context)
        graphs = sorted({min(size, LARGEST_GRAPH) for size in sizes})
        more |= {"cudagraph_capture_sizes": graphs, "max_cudagraph_capture_size": graphs[-1]}
    engine = VllmEngine(
        config.model.path,
        settings.model_copy(update=changes),
        # Merged adapters cost nothing a token, and their base would have to be loaded.
        lora=config.lora if config.lora.serving == "pinned" else NO_LORA,
        max_staleness=config.pipeline.max_staleness,
        more_arguments=more,
    )
    found = {}
    try:
        for size in sizes:
            requests = _requests(config, model, size, context, num_steps)
            found[size] = time_steps(engine, requests)
            for request in requests:
                engine.abort(request.request_id)
    finally:
        engine.close()
    return found


def _requests(
    config: RunConfig, model: ModelFacts, rows: int, context: int, num_steps: int
) -> list[SampleRequest]:
    """Groups of `rows` completions in all, and one of a single token."""
    rng = np.random.default_rng(rows)
    size = config.pipeline.group_size
    sizes = [*(min(size, rows - at) for at in range(0, rows, size)), 1]
    return [
        SampleRequest(
            request_id=index,
            prompt_tokens=rng.integers(0, model.vocabulary, context).astype(np.int32),
            num_completions=num,
            seed=index,
            max_tokens=num_steps if index < len(sizes) - 1 else 1,
            temperature=config.sampling.temperature,
        )
        for index, num in enumerate(sizes)
    ]


def time_steps(engine: Engine, requests: list[SampleRequest]) -> tuple[float, float]:
    """Seconds of one decode step of all of `requests` but the last, and of the GPU's work in it."""
    for request in requests:
        engine.submit(request)
    last = requests[-1].request_id
    while all(completion.request_id != last for completion in engine.step()):
        pass
    for _ in range(SETTLE_STEPS):
        engine.step()
    began_s, wall_s = time.perf_counter(), 0.0
    for step in itertools.count(1):
        engine.step()
        wall_s = (time.perf_counter() - began_s) / step
        if step == TIMED_STEPS or wall_s * step > _TIMED_S:
            break
    if not torch.cuda.is_available():
        return wall_s, wall_s  # the processor computes all the time
    return wall_s, device_seconds(lambda: engine.step(), PROFILED_STEPS) / PROFILED_STEPS


def device_seconds(step: Callable[[], object], num_steps: int) -> float:
    """How long the GPU did anything during that many steps; 0 if the profiler saw nothing."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in found.events() if event.device_type.name == "CUDA"]
    return covered((e.time_range.start, e.time_range.end) for e in events) * 1e-6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, end = 0.0, -math.inf
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
