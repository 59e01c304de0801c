"""Writes the run folder: metrics.jsonl, evals.jsonl, rollouts.jsonl, and W&B if asked. Rank 0 only."""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.config import RunConfig
from asyncrl.errors import AlertError
from asyncrl.learner import records, views
from asyncrl.learner.batch import StepBatch
from asyncrl.learner.controller import Decision
from asyncrl.learner.inbox import Delivery
from asyncrl.learner.pieces import Pieces
from asyncrl.learner.step import StepResult
from asyncrl.telemetry.alerts import Trends, Watch
from asyncrl.telemetry.attribution import record_shares
from asyncrl.telemetry.bottleneck import diagnose
from asyncrl.telemetry.metrics import resolve
from asyncrl.telemetry.sinks import JsonlSink, Sink, WandbSink, set_later_aside
from asyncrl.types import Rollout
from asyncrl.wire.messages import Batch, EvalDone

log = logging.getLogger(__name__)

_TIMED = (
    "wait_batch", "build", "forward", "backward", "optimizer", "probe", "snapshot", "checkpoint",
    "record",
)  # fmt: skip
_RATE_WINDOW_S = 1.0
"""Generators' rates, and all shares of time, are over the steps of at least this time."""

_EXTRAS_EVERY = 10
"""Steps between tables and histograms in W&B: a table is a file there."""

_BUSY = ("build", "forward", "backward", "optimizer", "probe", "snapshot")


class Recorder:
    """Turns a step's sums into one record and hands it to the sinks."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: Path,
        run_id: str,
        first_version: int,
        pieces: Pieces | None = None,
    ) -> None:
        """Open the files; records of steps that are made again from `first_version` move aside.

        Without `pieces` no rollout is kept token by token.
        """
        for name, key in (("metrics", "step"), ("rollouts", "step"), ("evals", "version")):
            set_later_aside(run_dir / f"{name}.jsonl", key=key, limit=first_version)
        self._keeps_rollouts = config.telemetry.rollouts
        self._num_generators = config.num_engines
        self._mask_truncated = config.algorithm.mask_truncated
        self._samples_per_prompt = config.eval.samples_per_prompt
        self._pieces = pieces
        self._rollouts = JsonlSink(run_dir / "rollouts.jsonl")
        self._evals = JsonlSink(run_dir / "evals.jsonl")
        self._metrics = JsonlSink(run_dir / "metrics.jsonl")
        self._sinks: list[Sink] = [self._rollouts, self._evals, self._metrics]
        self._wandb: WandbSink | None = None
        if config.telemetry.wandb != "off":
            self._wandb = WandbSink(
                mode=config.telemetry.wandb,
                project=config.telemetry.wandb_project,
                name=config.name,
                run_id=run_id,
                config=config.model_dump(mode="json"),
                folder=run_dir,
                group=config.telemetry.wandb_group,
            )
            self._sinks.append(self._wandb)
        self._samples: list[dict[str, Any]] = []
        self._start_s = self._last_s = time.monotonic()
        self._last_spans: dict[str, float] = {}
        self._counters: deque[tuple[float, dict[str, float]]] = deque([(self._start_s, {})])
        self._trends = Trends()
        self._alerts = config.telemetry.alerts
        self._watch = Watch() if self._alerts != "off" else Watch(())

    def rollouts(self, delivery: Delivery, *, batch: StepBatch, result: StepResult) -> None:
        """One line for every rollout of the step's batch, some with every token; none if switched off."""
        if not self._keeps_rollouts:
            return
        generators = {}
        if delivery.batch is not None:
            generators = {ref.group_id: ref.generator for ref in delivery.batch.groups}
        step, detailed = batch.version, {place for place, _ in batch.details}
        self._samples = []
        for place, (group, advantages) in enumerate(
            zip(delivery.groups, batch.advantages, strict=True)
        ):
            name = generators.get(group.group_id, "")
            for index, (rollout, advantage) in enumerate(
                zip(group.rollouts, advantages.tolist(), strict=True)
            ):
                line = records.rollout_record(step, group, index, rollout, generator=name)
                line["advantage"] = round(advantage, 5) if math.isfinite(advantage) else None
                line["fate"] = records.fate(rollout, advantage, mask_truncated=self._mask_truncated)
                if place in detailed or not detailed:
                    self._samples.append(line)
                if place in detailed and self._pieces is not None:
                    texts = self._pieces(rollout.completion_tokens.tolist())
                    start = batch.details.get((place, index))
                    measured = _measured(rollout, start, result)
                    line["tokens"] = records.token_columns(rollout, texts, measured)
                self._rollouts.write(line)

    def step(
        self,
        delivery: Delivery,
        *,
        batch: StepBatch,
        result: StepResult,
        bound: Decision,
        spans: dict[str, float],
    ) -> None:
        """One record of the step that trained `batch.version`; `spans` are the tracer's totals.

        Raises:
            AlertError: an alert began and telemetry.alerts is "stop".
        """
        now_s = time.monotonic()
        step_s = max(now_s - self._last_s, 1e-9)
        self._last_s = now_s
        sums = batch.sums | records.batch_sums(delivery.groups) | result.sums | result.values
        sums |= self._trends.step(result.values)
        sums["staleness/bound"] = float(bound.bound)
        sums["staleness/engine_mismatch"] = float(bound.engine_mismatch)
        sums["rate/trained_tokens_per_s"] = batch.num_tokens / step_s
        sums |= self._times(spans, step_s)
        if delivery.batch is not None:
            sums |= self._broker_values(delivery.batch, spans)
        record: dict[str, Any] = {
            "step": batch.version,
            "version": batch.version + 1,
            "time_s": round(now_s - self._start_s, 3),
        }
        checks = {"check": sums.get("canary/checks", 0.0)}
        record |= resolve(sums, batch.counts | result.counts | checks)
        if shares := record_shares(record):
            record["bottleneck"] = diagnose(shares).limit
        if result.skipped:
            record["skipped"] = result.skipped
        on, began = self._watch.step(record)
        record["alerts"] = [alert.name for alert in on]
        if began:
            record["new_alerts"] = [alert.describe(record[alert.metric]) for alert in began]
        self._metrics.write(record)
        if self._wandb is not None:
            self._show(self._wandb, record, result, alerts=[alert.name for alert in began])
        self._raise_or_warn(batch.version, record.get("new_alerts", []))

    def _show(
        self, view: WandbSink, record: dict[str, Any], result: StepResult, *, alerts: Sequence[str]
    ) -> None:
        """The step in W&B; every so often with histograms and a table of rollouts beside it."""
        histograms, tables = {}, {}
        if record["step"] % _EXTRAS_EVERY == 0:
            histograms = views.histograms(record, result.ratio_bins)
            if self._samples:
                tables["rollouts"] = views.rollout_table(self._samples)
        named = list(zip(alerts, record.get("new_alerts", []), strict=True))
        view.write(record, histograms=histograms, tables=tables, alerts=named)

    def _raise_or_warn(self, step: int, texts: Sequence[str]) -> None:
        for text in texts:
            log.warning("step %d: %s", step, text)
        if texts and self._alerts == "stop":
            raise AlertError(f'step {step}, telemetry.alerts="stop": {"; ".join(texts)}')

    def _broker_values(self, batch: Batch, spans: dict[str, float]) -> dict[str, float]:
        """Ledger, everybody's rates and shares, and the newest evaluation, as the Batch brought them."""
        now_s = time.monotonic()
        # Generators report a few times a second; over less than a window a rate would flicker.
        while len(self._counters) > 1 and now_s - self._counters[1][0] >= _RATE_WINDOW_S:
            self._counters.popleft()
        then_s, before = self._counters[0]
        counters = batch.counters | spans
        values = records.ledger_values(batch) | records.generator_values(
            counters,
            before,
            seconds=max(now_s - then_s, 1e-9),
            num_generators=self._num_generators,
        )
        self._counters.append((now_s, counters))
        values["staleness/queued_s"] = sum(ref.queued_s for ref in batch.groups)
        self.evaluations(batch.evals)
        if batch.evals:
            values |= records.eval_values(batch.evals[-1])
        return values

    def _times(self, spans: dict[str, float], step_s: float) -> dict[str, float]:
        """Seconds of this step by phase, from the tracer's running totals."""
        before, self._last_spans = self._last_spans, spans
        spent = {
            name: spans.get(f"learner/{name}", 0.0) - before.get(f"learner/{name}", 0.0)
            for name in _TIMED
        }
        times = {f"time/{name}_s": seconds for name, seconds in spent.items()}
        times["time/step_s"] = step_s
        times["learner/busy_frac"] = min(1.0, sum(spent[name] for name in _BUSY) / step_s)
        return times

    def evaluations(self, evals: Sequence[EvalDone]) -> None:
        """One line for every evaluation, on its own axis: the version."""
        for evaluation in evals:
            num_samples = evaluation.num_samples + evaluation.num_unscored
            self._evals.write(
                evaluation.model_dump(exclude={"kind"})
                | {
                    "num_prompts": num_samples // self._samples_per_prompt,
                    "time_s": round(time.monotonic() - self._start_s, 3),
                }
            )
            if self._wandb is not None:
                self._wandb.write(records.eval_values(evaluation))

    def close(self) -> None:
        """Flush every sink, in bounded time."""
        for sink in self._sinks:
            sink.close()


def _measured(rollout: Rollout, start: int | None, result: StepResult) -> NDArray[np.float64]:
    """[3, C] what the learner made of the tokens; 0 where nothing."""
    num_tokens = len(rollout.completion_tokens)
    if start is None or result.details is None:
        return np.zeros((3, num_tokens))
    return result.details[:, start : start + num_tokens]
