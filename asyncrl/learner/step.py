"""One optimizer step: version v becomes v + 1, or nothing changes at all.

    gradient = sum over ranks and micro-batches of grad L_m,   L_m already divided by the global N

so it depends neither on the micro-batches nor on the number of ranks. FSDP averages gradients over
the ranks; the loss is multiplied by their number to undo that. Weights and Adam moments stay bit
for bit as they were when

| what                                     | StepResult.skipped |
|------------------------------------------|--------------------|
| N = 0: no rollout of the step trains     | "no tokens"        |
| every advantage is 0                     | "no signal"        |
| the loss or the gradient is not finite   | "not finite"       |

AdamW: arXiv:1711.05101. Its rate is constant after a linear warm-up, and a function of the version
alone, so that a resumed run continues the same schedule.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.algo import Loss, TokenBatch
from asyncrl.algo.diagnostics import mismatch_means, mismatch_sums
from asyncrl.learner.batch import MicroBatch, StepBatch
from asyncrl.learner.model import Policy
from asyncrl.learner.ranks import Ranks
from asyncrl.telemetry.trace import Tracer


class Optimizer:
    """AdamW over a policy's parameters; matrices decay, vectors (norms, biases) do not."""

    def __init__(
        self,
        policy: Policy,
        *,
        learning_rate: float,
        weight_decay: float,
        beta1: float,
        beta2: float,
        max_grad_norm: float,
        num_warmup_steps: int,
    ) -> None:
        """Call after the policy was sharded and moved to its device."""
        self.parameters = dict(policy.named_weights())
        """By the model's own name; tied ones once."""

        self._learning_rate = learning_rate
        self._num_warmup_steps = num_warmup_steps
        self._max_grad_norm = max_grad_norm
        parameters = list(self.parameters.values())
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=(beta1, beta2),
            fused=True,
        )

    def learning_rate(self, version: int) -> float:
        """Rate of the step that trains `version`; a warm-up of n steps begins with 1/n of it."""
        if self._num_warmup_steps == 0:
            return self._learning_rate
        return self._learning_rate * min(1.0, (version + 1) / self._num_warmup_steps)

    def grad_norm(self) -> Tensor:
        """Euclidean norm of the whole gradient, over all ranks; a scalar on the device."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, version: int, grad_norm: Tensor) -> None:
        """Scale the gradient down to max_grad_norm if it is longer, and update."""
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate(version)
        nn.utils.clip_grads_with_norm_(
            self.parameters.values(), self._max_grad_norm, grad_norm, foreach=None
        )
        self.adam.step()

    def clear(self) -> None:
        """Drop the gradient."""
        self.adam.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did. Metric names are those of telemetry/metrics.py."""

    skipped: Literal["", "no tokens", "no signal", "not finite"]
    """Why nothing was changed; "" if the policy was updated."""

    sums: dict[str, float]
    """Sums over the measured tokens of all ranks; without non-finite ones."""

    values: dict[str, float]
    """Not to be divided any more: mismatch, entropy, gradient norm, learning rate."""

    num_measured: float
    """Tokens that the sums run over: N, less what build_step was told to leave out."""


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    batch: StepBatch,
    *,
    loss: Loss,
    temperature: float,
    ranks: Ranks,
    tracer: Tracer,
) -> StepResult:
    """Train on this rank's share of the step (batch.split_for_ranks); every rank must call it.

    Args:
        policy: computes the log-probs; updated in place.
        optimizer: of that policy.
        batch: micro-batches, and N over all ranks.
        loss: a loss of asyncrl.algo with its settings bound.
        temperature: of the sampling, applied to the learner's logits as well.
        ranks: this process among the learner's.
        tracer: gets the spans learner/forward, learner/backward and learner/optimizer.
    """
    if batch.num_tokens == 0:
        return _unmeasured("no tokens")
    if not batch.has_signal:
        return _unmeasured("no signal")
    optimizer.clear()
    totals, largest = _accumulate(policy, batch, loss, temperature, ranks.world, tracer)
    with tracer.span("learner/optimizer"):
        sums = ranks.all_reduce_sums(totals)
        maxima = ranks.all_reduce_maxima({"mismatch/max": largest})
        grad_norm = optimizer.grad_norm()
        # The same on every rank, since both numbers are: all step or none does.
        finite = math.isfinite(sums["loss/policy"]) and math.isfinite(float(grad_norm))
        if finite:
            optimizer.step(batch.version, grad_norm)
        optimizer.clear()
    num_measured = sums.pop("tokens")
    values = {
        "policy/entropy": sums.pop("policy/entropy") / num_measured,
        **mismatch_means({n: sums.pop(n) for n in list(sums) if "@" in n}),
        **maxima,
        "optimizer/grad_norm": float(grad_norm),
        "optimizer/learning_rate": optimizer.learning_rate(batch.version),
        "optimizer/skipped": float(not finite),
    }
    return StepResult(
        skipped="" if finite else "not finite",
        sums={name: value for name, value in sums.items() if math.isfinite(value)},
        values={name: value for name, value in values.items() if math.isfinite(value)},
        num_measured=num_measured,
    )


def _accumulate(
    policy: Policy, batch: StepBatch, loss: Loss, temperature: float, world: int, tracer: Tracer
) -> tuple[dict[str, Tensor], Tensor]:
    """Add up this rank's gradient; returns its sums and largest mismatch, still on the device."""
    device = next(policy.parameters()).device
    totals: dict[str, Tensor] = {}
    largest = torch.zeros((), device=device)
    for micro_batch in batch.micro_batches:
        with tracer.span("learner/forward"):
            tokens, entropy = _forward(policy, micro_batch, temperature, device)
            value, sums = loss(tokens, num_tokens=batch.num_tokens)
            mismatch, magnitude = mismatch_sums(tokens, max_staleness=batch.max_staleness)
        with tracer.span("learner/backward"):
            (value * world).backward()
        sums = sums | mismatch
        sums["policy/entropy"] = entropy.where(tokens.completion_mask, 0.0).sum()
        sums["tokens"] = tokens.completion_mask.sum()
        for name, amount in sums.items():
            totals[name] = totals.get(name, torch.zeros((), device=device)) + amount.double()
        largest = torch.maximum(largest, magnitude)
    return totals, largest


def _forward(
    policy: Policy, micro_batch: MicroBatch, temperature: float, device: torch.device
) -> tuple[TokenBatch, Tensor]:
    """The current policy's view of a micro-batch, and its entropies [T]."""

    def tensor(array: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(array, dtype=dtype).to(device, non_blocking=True)

    logprobs, entropy = policy(
        tensor(micro_batch.tokens, torch.int64),
        tensor(micro_batch.position_ids, torch.int64),
        None if micro_batch.is_causal else tensor(micro_batch.segments, torch.int64),
        tensor(micro_batch.predictor_index, torch.int64),
        tensor(micro_batch.targets, torch.int64),
        temperature,
    )
    tokens = TokenBatch(
        logprobs=logprobs,
        # One update per batch: the policy of this very pass is the one at the start of the step.
        proximal_logprobs=logprobs.detach(),
        behaviour_logprobs=tensor(micro_batch.behaviour_logprobs, torch.float32),
        advantages=tensor(micro_batch.advantages, torch.float32),
        completion_mask=tensor(micro_batch.completion_mask, torch.bool),
        staleness=tensor(micro_batch.staleness, torch.int32),
    )
    return tokens, entropy


def _unmeasured(reason: Literal["no tokens", "no signal"]) -> StepResult:
    return StepResult(skipped=reason, sums={}, values={"optimizer/skipped": 1.0}, num_measured=0.0)
