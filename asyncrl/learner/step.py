"""One step: version v becomes v + 1 by one optimizer update per minibatch, or nothing changes at all.

    gradient = sum over ranks and micro-batches of grad L_m,   L_m already divided by the update's N

so it depends neither on the micro-batches nor on the number of ranks. FSDP averages gradients over
the ranks; the loss is multiplied by their number to undo that. An update leaves weights and Adam
moments bit for bit as they were when

| what                                                           | if so for all: StepResult.skipped |
|----------------------------------------------------------------|-----------------------------------|
| N = 0: no rollout of the minibatch trains                      | "no tokens"                       |
| every advantage is 0, and the objective needs one              | "no signal"                       |
| the loss or the gradient is not finite                         | "not finite"                      |
| the correction rejected every token, and the objective needs one | "all rejected"                  |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algo import TokenBatch
from asyncrl.learner.batch import Minibatch, StepBatch
from asyncrl.learner.details import Details
from asyncrl.learner.gradients import GradientSketch
from asyncrl.learner.model import Policy, Scores
from asyncrl.learner.objective import Objective
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.packing import MicroBatch
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.totals import Measured, Totals
from asyncrl.telemetry.trace import Tracer

Skipped = Literal["", "no tokens", "no signal", "not finite", "all rejected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did. Metric names are those of telemetry/metrics.py."""

    skipped: Skipped
    """Why no update changed anything; "" if one did."""

    sums: dict[str, float]
    """Sums over the measured tokens of all ranks; without non-finite ones."""

    values: dict[str, float]
    """Not to be divided any more: mismatch, entropy, gradient norm, learning rate."""

    num_measured: float
    """Tokens that the sums run over: N, less what build_step was told to leave out."""

    num_nonfinite: int
    """Updates whose loss or gradient was not finite."""

    details: NDArray[np.float64] | None = None
    """[3, batch.num_detailed_tokens], rows as in details.py; None if no token is recorded."""

    ratio_bins: NDArray[np.float64] | None = None
    """[k + 1, bins] tokens by staleness and log pi_prox / mu (algo/diagnostics.py)."""

    @property
    def counts(self) -> dict[str, float]:
        """What those sums are divided by, beside the batch's own counts: "measured", "sequence"."""
        num_sequences = self.sums.get("correction/sequences", 0.0)
        return {"measured": self.num_measured, "sequence": num_sequences}


@dataclass(frozen=True, slots=True)
class _Update:
    """What one update did; the same on every rank."""

    measured: Measured
    grad_norm: float
    grad_cosine: float | None
    skipped: Skipped


@dataclass(frozen=True, slots=True)
class _Scorer:
    """Micro-batches under the policy."""

    policy: Policy
    reference: Scores | None
    temperature: float
    objective: Objective
    device: torch.device

    def logprobs(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """[T] log-probs and entropies, the latter differentiable only if that is of use."""
        return self._score(
            self.policy, micro_batch, entropy_gradient=self.objective.entropy_bonus > 0
        )

    @torch.no_grad()
    def reference_logprobs(self, micro_batch: MicroBatch) -> Tensor | None:
        """[T] under the reference policy; None without one."""
        if self.reference is None:
            return None
        return self._score(self.reference, micro_batch, entropy_gradient=False)[0]

    def _score(
        self, policy: Scores, micro_batch: MicroBatch, *, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = policy(
            self._tensor(micro_batch.tokens, torch.int64),
            self._tensor(micro_batch.position_ids, torch.int64),
            None if micro_batch.is_causal else self._tensor(micro_batch.segments, torch.int64),
            self._tensor(micro_batch.predictor_index, torch.int64),
            self._tensor(micro_batch.targets, torch.int64),
            self.temperature,
            entropy_gradient=entropy_gradient,
        )
        return logprobs, entropy

    def tokens(self, micro_batch: MicroBatch, proximal: Tensor | None) -> tuple[TokenBatch, Tensor]:
        """What the objective reads, and the entropies; without `proximal` it is this very pass."""
        logprobs, entropy = self.logprobs(micro_batch)
        tokens = TokenBatch(
            logprobs=logprobs,
            proximal_logprobs=logprobs.detach() if proximal is None else proximal,
            behaviour_logprobs=self._tensor(micro_batch.behaviour_logprobs, torch.float32),
            advantages=self._tensor(micro_batch.advantages, torch.float32),
            completion_mask=self._tensor(micro_batch.completion_mask, torch.bool),
            staleness=self._tensor(micro_batch.staleness, torch.int32),
            sequence=self._tensor(micro_batch.sequence, torch.int64),
            behaviour_weights=torch.ones_like(logprobs, requires_grad=False),
            scale=self._tensor(micro_batch.scale, torch.float32),
            reference_logprobs=self.reference_logprobs(micro_batch),
        )
        return tokens, entropy

    def _tensor(self, array: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(array, dtype=dtype).to(self.device, non_blocking=True)


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    batch: StepBatch,
    *,
    objective: Objective,
    temperature: float,
    ranks: Ranks,
    tracer: Tracer,
    reference: Scores | None = None,
    diagnose: bool = True,
    sketch: GradientSketch | None = None,
) -> StepResult:
    """Train on this rank's share of the step (batch.split_for_ranks); every rank must call it.

    Args:
        policy: computes the log-probs; updated in place.
        optimizer: of that policy.
        batch: minibatches, each with its micro-batches and its N over all ranks.
        objective: what each update minimises.
        temperature: of the sampling, applied to the learner's logits as well.
        ranks: this process among the learner's.
        tracer: gets the spans learner/forward, learner/backward and learner/optimizer.
        reference: the frozen policy of the objective's KL term.
        diagnose: measure the mismatch by staleness (algo/diagnostics.py).
        sketch: compares each gradient with the one before it.
    """
    minibatches = [m for m in batch.minibatches if _has_gradient(m, objective)]
    if not minibatches:
        return _unmeasured("no signal" if batch.num_tokens else "no tokens")
    device = next(policy.parameters()).device
    scorer = _Scorer(policy, reference, temperature, objective, device)
    with tracer.span("learner/forward"):
        # Before the first update changes what "the start of the step" means.
        anchors = [_recomputed(scorer, minibatch) for minibatch in minibatches]
    updates = []
    details = Details(batch.num_detailed_tokens, device) if batch.num_detailed_tokens else None
    for minibatch, proximal in zip(minibatches, anchors, strict=True):
        optimizer.clear()
        totals = Totals(batch.max_staleness if diagnose else None, scorer.device)
        _accumulate(scorer, minibatch, proximal, totals, details, ranks.world, tracer)
        with tracer.span("learner/optimizer"):
            measured = totals.reduce(ranks)
            updates.append(_apply(optimizer, batch.version, measured, objective, ranks, sketch))
    result = _result(updates, optimizer.learning_rate(batch.version))
    return replace(result, details=details.reduce(ranks)) if details is not None else result


def _has_gradient(minibatch: Minibatch, objective: Objective) -> bool:
    return minibatch.num_tokens > 0 and (minibatch.has_signal or objective.every_token_pulls)


@torch.no_grad()
def _recomputed(scorer: _Scorer, minibatch: Minibatch) -> Sequence[Tensor | None]:
    """Log-probs of every micro-batch under the weights as they are, if the objective wants them."""
    if scorer.objective.proximal != "recomputed":
        return [None] * len(minibatch.micro_batches)
    return [scorer.logprobs(micro_batch)[0] for micro_batch in minibatch.micro_batches]


def _accumulate(
    scorer: _Scorer,
    minibatch: Minibatch,
    proximal: Sequence[Tensor | None],
    totals: Totals,
    details: Details | None,
    world: int,
    tracer: Tracer,
) -> None:
    """Add up this rank's gradient, and into `totals` what was measured on the way."""
    objective = scorer.objective
    for micro_batch, recomputed in zip(minibatch.micro_batches, proximal, strict=True):
        with tracer.span("learner/forward"):
            tokens, entropy = scorer.tokens(micro_batch, recomputed)
            value, sums, weights = objective(
                objective.anchor(tokens), entropy, num_tokens=minibatch.num_tokens
            )
            # Of a policy that was really computed: `tokens` is not anchored.
            totals.add(tokens, sums | {"tokens": tokens.completion_mask.sum()}, weights)
            if details is not None:
                details.add(micro_batch.detail, tokens, weights)
        with tracer.span("learner/backward"):
            (value * world).backward()


def _apply(
    optimizer: Optimizer,
    version: int,
    measured: Measured,
    objective: Objective,
    ranks: Ranks,
    sketch: GradientSketch | None,
) -> _Update:
    """Update the policy if there is something finite to update with; drop the gradient either way."""
    norm = optimizer.grad_norm()
    # The same on every rank, since all these numbers are: all step or none does.
    skipped: Skipped = ""
    if not (math.isfinite(measured.sums["loss/policy"]) and math.isfinite(float(norm))):
        skipped = "not finite"
    elif measured.sums["correction/weight"] == 0 and not objective.rejected_tokens_pull:
        # Not an update by 0: Adam's momentum would move the weights all the same.
        skipped = "all rejected"
    cosine = None
    if not skipped:
        cosine = sketch.cosine(ranks) if sketch is not None else None
        optimizer.step(version, norm)
    optimizer.clear()
    return _Update(measured, float(norm), cosine, skipped)


def _result(updates: Sequence[_Update], learning_rate: float) -> StepResult:
    """The updates of a step, added up."""
    measured = Measured.total([update.measured for update in updates])
    sums = dict(measured.sums)
    num_updates = sum(not update.skipped for update in updates)
    num_nonfinite = sum(update.skipped == "not finite" for update in updates)
    num_measured = sums.pop("tokens")
    values = {
        "policy/entropy": sums.pop("policy/entropy") / num_measured,
        **measured.mismatch(),
        "optimizer/grad_norm": max(update.grad_norm for update in updates),
        "optimizer/learning_rate": learning_rate,
        "optimizer/skipped": float(num_updates == 0),
        "optimizer/updates": float(num_updates),
    }
    cosines = [update.grad_cosine for update in updates if update.grad_cosine is not None]
    if cosines:
        values["optimizer/grad_cosine"] = cosines[-1]
    return StepResult(
        skipped="" if num_updates else updates[-1].skipped,
        sums={name: value for name, value in sums.items() if math.isfinite(value)},
        values={name: value for name, value in values.items() if math.isfinite(value)},
        num_measured=num_measured,
        num_nonfinite=num_nonfinite,
        ratio_bins=measured.tables.get("ratios"),
    )


def _unmeasured(reason: Skipped) -> StepResult:
    values = {"optimizer/skipped": 1.0, "optimizer/updates": 0.0}
    return StepResult(skipped=reason, sums={}, values=values, num_measured=0.0, num_nonfinite=0)
