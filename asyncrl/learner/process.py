"""The learner: want a batch, check it, train it, publish, record; it never waits for an adoption.

Step s trains version s into version s + 1. The batch of s + 1 is asked for before s + 1 is published, so
it travels and is decoded while the snapshot is digested. The version rises even when a step was skipped
(no signal, gradient not finite): its groups count as trained, the weights stay what they were.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.algo import ADVANTAGES, AGGREGATIONS, Advantage
from asyncrl.algo.advantages import with_overlong_penalty
from asyncrl.config import RunConfig
from asyncrl.errors import NonFiniteLossError, ProtocolError
from asyncrl.learner import checkpoint
from asyncrl.learner.batch import StepBatch, build_step, split_for_ranks
from asyncrl.learner.controller import Decision, StalenessController
from asyncrl.learner.gradients import GradientSketch
from asyncrl.learner.inbox import Delivery, Inbox
from asyncrl.learner.model import Policy, Scores
from asyncrl.learner.objective import Objective
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.probe import Prober
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.recorder import Recorder
from asyncrl.learner.step import StepResult, train_step
from asyncrl.telemetry.trace import Tracer
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.snapshot import Snapshotter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Where this learner begins."""

    version: int
    epoch: int
    cursor: int
    resumed: bool


@dataclass(slots=True, kw_only=True)
class Learner:
    """One rank of the learner; built by assemble.py. Publisher and recorder are rank 0's."""

    config: RunConfig
    run_dir: Path
    start: StartPoint
    ranks: Ranks
    policy: Policy
    optimizer: Optimizer
    tokenizer: Any
    inbox: Inbox
    snapshotter: Snapshotter
    publisher: Publisher | None
    recorder: Recorder | None
    tracer: Tracer
    prober: Prober | None = None
    reference: Scores | None = None
    sketch: GradientSketch | None = None
    controller: StalenessController | None = None
    _num_skipped: int = 0

    def run(self) -> None:
        """Train up to pipeline.num_steps, evaluate, save."""
        version, last = self.start.version, self.config.pipeline.num_steps
        if version >= last:
            log.info("nothing to do: version %d, pipeline.num_steps=%d", version, last)
            return
        if self.start.resumed:
            self._publish(version)  # generators start from model.path, which is version 0
        self.inbox.want(version)
        for step in range(version, last):
            self._step(step)
        with self.tracer.span("learner/eval"):
            evals = self.inbox.await_eval(last, self.config.eval.deadline_s)
        if self.recorder is not None:
            self.recorder.evaluations(evals)

    def _step(self, step: int) -> None:
        with self.tracer.span("learner/wait_batch"):
            delivery = self.inbox.take(step)
        if delivery.batch is not None:
            ledger = delivery.batch.ledger
            self.tracer.count("groups", queued=ledger.queued, in_flight=ledger.in_flight)
        with self.tracer.span("learner/build"):
            batch = self._build(step, delivery)
        result = train_step(
            self.policy,
            self.optimizer,
            split_for_ranks(batch, self.ranks.rank, self.ranks.world),
            objective=Objective.of(self.config.algorithm),
            temperature=self.config.sampling.temperature,
            ranks=self.ranks,
            tracer=self.tracer,
            reference=self.reference,
            sketch=self.sketch,
        )
        self._check_finite(step, result)
        bound = self._adapt(result)
        if step + 1 < self.config.pipeline.num_steps:
            self.inbox.want(step + 1)
        self._publish(step + 1)
        self._save(step + 1, delivery)
        if self.recorder is not None:
            with self.tracer.span("learner/record"):
                self.recorder.rollouts(delivery, batch=batch, result=result)
                # The step ends here: what recording takes from here on is the next step's.
                self.tracer.mark("step", version=step + 1)
                spans = self.tracer.totals()
                self.recorder.step(delivery, batch=batch, result=result, bound=bound, spans=spans)

    def _build(self, step: int, delivery: Delivery) -> StepBatch:
        config, algorithm = self.config, self.config.algorithm
        if delivery.max_staleness > config.pipeline.max_staleness:
            raise ProtocolError(
                f"the batch of step {step} was admitted under a staleness bound of "
                f"{delivery.max_staleness}, above pipeline.max_staleness="
                f"{config.pipeline.max_staleness}"
            )
        return build_step(
            delivery.groups,
            version=step,
            max_staleness=delivery.max_staleness,
            advantage=bind_advantage(config),
            aggregation=partial(
                AGGREGATIONS[algorithm.aggregation], constant=config.engine.max_completion_tokens
            ),
            num_minibatches=algorithm.num_minibatches,
            mask_truncated=algorithm.mask_truncated,
            share_prompts=config.learner.share_prompts,
            micro_batch_tokens=config.learner.micro_batch_tokens,
            skip_zero_advantage=not algorithm.every_token_pulls,
            num_detailed_groups=config.telemetry.num_detailed_groups,
        )

    def _adapt(self, result: StepResult) -> Decision:
        """The staleness bound after this step; the same on every rank."""
        if self.controller is None:
            return Decision(self.config.pipeline.max_staleness)
        exp_abs = result.values.get("mismatch/exp_abs")
        decision = self.controller.observe(
            divergence=None if exp_abs is None else exp_abs - 1.0,
            ess=result.values.get("mismatch/ess"),
        )
        if decision.change:
            log.info("the staleness bound is %d from here on", decision.bound)
            self.inbox.set_staleness(decision.bound)
        return decision

    def _check_finite(self, step: int, result: StepResult) -> None:
        if result.skipped:
            log.warning("step %d changed no weight: %s", step, result.skipped)
        if result.num_nonfinite and not result.skipped:
            log.warning("step %d: %d updates were not finite", step, result.num_nonfinite)
        self._num_skipped = self._num_skipped + 1 if result.num_nonfinite else 0
        limit = self.config.optimizer.max_skipped_steps
        if self._num_skipped >= limit:
            raise NonFiniteLossError(
                f"loss or gradient not finite in {limit} steps in a row, the last of them step {step} "
                "(optimizer.max_skipped_steps); lower optimizer.learning_rate, or look at mismatch/* "
                "in metrics.jsonl"
            )

    def _publish(self, version: int) -> None:
        scores, probe = None, None
        if self.prober is not None:
            with self.tracer.span(
                "learner/probe"
            ):  # on a GPU it runs while the snapshot is prepared
                passed = version - self.start.version
                scores = self.prober.score(self.policy, num_passed=passed)
        with self.tracer.span("learner/snapshot"):
            snapshot = self.snapshotter.take(version)
        self.tracer.mark("version", version=version)
        if self.publisher is not None and snapshot is not None:
            if self.prober is not None:
                probe = self.prober.probe(version, scores)
            final = version == self.config.pipeline.num_steps
            self.publisher.publish(snapshot, final=final, probe=probe)

    def _save(self, version: int, delivery: Delivery) -> None:
        every = self.config.checkpoint.every_steps
        last = version == self.config.pipeline.num_steps
        if not last and (every == 0 or version % every != 0):
            return
        with self.tracer.span("learner/checkpoint"):
            checkpoint.save(
                self.run_dir / "checkpoints",
                checkpoint.CheckpointFacts(
                    version=version,
                    epoch=self.start.epoch,
                    cursor=delivery.batch.cursor if delivery.batch is not None else 0,
                    lineage=self.config.lineage,
                    run_name=self.config.name,
                ),
                self.policy,
                self.optimizer,
                tokenizer=self.tokenizer,
                num_kept=self.config.checkpoint.num_kept,
                ranks=self.ranks,
            )


def bind_advantage(config: RunConfig) -> Advantage:
    """The configured advantage, of scores that were shaped as configured."""
    advantage = ADVANTAGES[config.algorithm.advantage]
    if config.algorithm.overlong_buffer_tokens == 0:
        return advantage
    return with_overlong_penalty(
        advantage,
        max_completion_tokens=config.engine.max_completion_tokens,
        buffer_tokens=config.algorithm.overlong_buffer_tokens,
    )
