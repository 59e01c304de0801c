"""Builds a generator from a configuration and runs it."""

import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, PeerLostError, in_a_line
from asyncrl.generator.engine import Engine
from asyncrl.generator.engines import make_engine
from asyncrl.generator.process import Generator
from asyncrl.generator.prompts import PromptRenderer
from asyncrl.tasks import make_task
from asyncrl.tasks.scoring import ScoringPool
from asyncrl.telemetry.trace import Tracer, process_start_s
from asyncrl.weights.subscriber import Subscriber
from asyncrl.wire.mailbox import Mailbox
from asyncrl.wire.messages import Hello

log = logging.getLogger(__name__)

_TRACE_GRAIN_S = 0.05
"""Decode steps and verdicts, hundreds a second, go to the trace file summed up over this long."""


def run(
    config: RunConfig,
    *,
    endpoint: str,
    run_id: str,
    token: str,
    run_dir: Path,
    name: str,
    incarnation: int,
) -> None:
    """Load the model, join the broker at `endpoint`, work until it says Stop."""
    traces = run_dir / "trace" if config.telemetry.trace else None
    tracer = Tracer(
        traces and traces / f"{name}.jsonl", process=name, kind="generator",
        since_s=process_start_s(), grain_s=_TRACE_GRAIN_S,
    )  # fmt: skip
    engine = _engine(config, tracer)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    renderer = PromptRenderer(tokenizer, make_task(config.task, seed=config.seed))
    renderer.render("train", 0)  # a template that does not fit fails before anything is started
    scorers = _scorer_tracers(traces, name, config.scoring.num_workers)
    pool = _pool(config, scorers)
    hello = Hello(
        role="generator", name=name, run_id=run_id, config_digest=config.digest, token=token,
        incarnation=incarnation,
    )  # fmt: skip
    mailbox = Mailbox(endpoint, hello, connect_timeout_s=config.host.start_timeout_s)
    subscriber = Subscriber(
        run_id,
        token=token,
        chunks_in_flight=config.weights.chunks_in_flight,
        timeout_s=config.weights.timeout_s,
        staging=engine.staging(),
        on_change=mailbox.bell.ring,
    )
    mark_joined(run_dir, name)
    tracer.joined()
    try:
        stop = Generator(
            config,
            mailbox=mailbox,
            engine=engine,
            renderer=renderer,
            pool=pool,
            subscriber=subscriber,
            tracer=tracer,
        ).run()
        if stop.failed:
            raise PeerLostError(f"the broker stopped this generator: {stop.reason}")
        log.info("stopping: %s", stop.reason)
    finally:
        error = sys.exception()
        mailbox.close(
            "told to stop" if error is None else in_a_line(error), failed=error is not None
        )
        pool.close()
        subscriber.close()
        for each in (tracer, *scorers):
            each.close()
        engine.close()


def _engine(config: RunConfig, tracer: Tracer) -> Engine:
    engine = make_engine(
        config.model.path,
        config.engine,
        lora=config.lora,
        max_staleness=config.pipeline.max_staleness,
        on_prefill=partial(tracer.add, "generator/prefill", within="generator/decode"),
    )
    _check_room(config, engine)
    return engine


def _pool(config: RunConfig, scorers: list[Tracer]) -> ScoringPool:
    return ScoringPool(
        config.task,
        config.seed,
        num_workers=config.scoring.num_workers,
        deadline_s=config.scoring.deadline_s,
        max_memory_bytes=config.scoring.max_memory_bytes,
        on_busy=partial(_write_score, scorers),
    )


def _scorer_tracers(traces: Path | None, generator: str, num_workers: int) -> list[Tracer]:
    """One for each scoring process, written by its generator, which is told when it was at work."""
    names = [f"{generator}-scorer-{index}" for index in range(num_workers)]
    return [
        Tracer(
            traces and traces / f"{name}.jsonl", process=name, kind="scorer", grain_s=_TRACE_GRAIN_S
        )
        for name in names
    ]


def _write_score(tracers: Sequence[Tracer], index: int, start_s: float, end_s: float) -> None:
    tracers[index].add("scorer/score", start_s, end_s)


def _check_room(config: RunConfig, engine: Engine) -> None:
    if config.engine.max_prompt_tokens >= engine.max_context_tokens:
        raise ConfigError(
            f"engine.max_prompt_tokens={config.engine.max_prompt_tokens} leaves no room for a "
            f"completion in the model's context of {engine.max_context_tokens} tokens"
        )


def mark_joined(run_dir: Path, name: str) -> None:
    """Tell the supervisor that this process has joined the run."""
    path = run_dir / "joined" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
