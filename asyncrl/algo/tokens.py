"""What a loss may read: one packed micro-batch, token by token.

Shapes: T = completion tokens of one micro-batch (padding may be among them, masked out); a completion
is never split over micro-batches.

A loss is a function

    (batch, *, num_tokens, ...settings) -> (loss, sums)
    loss = 1/N sum_t  scale_t * behaviour_weights_t * l_t          N = num_tokens

where N counts the completion tokens of the whole optimizer update, over all ranks and micro-batches,
before any rejection: micro-batch losses add up to the update's however it was cut. `sums` holds, by
metric name, sums over the micro-batch.
"""

from typing import NamedTuple

from torch import Tensor


class TokenBatch(NamedTuple):
    """Every field is [T] on one device; float32 (float64 in tests) unless said."""

    logprobs: Tensor
    """log pi_theta of the token at t, in nats; the only field with a gradient."""

    proximal_logprobs: Tensor
    """log pi_prox, the learner's policy at the start of the step, in the learner's numerics."""

    behaviour_logprobs: Tensor
    """log mu, as the generator's engine reported it when it sampled the token."""

    advantages: Tensor

    completion_mask: Tensor
    """bool; True where mu sampled the token and it may be trained."""

    staleness: Tensor
    """int32; version being trained minus the version that sampled the token, 0..k."""

    sequence: Tensor
    """int64; which completion of this micro-batch the token belongs to, 0..S-1."""

    behaviour_weights: Tensor
    """Constant; what the off-policy correction multiplies the token's loss with, computed before the
    loss by corrections.correct: 1 = none, 0 = rejected (the token still counts in N)."""

    scale: Tensor
    """Constant; the token's share under the aggregation, relative to the token mean: 1 = token mean."""

    reference_logprobs: Tensor | None = None
    """log pi_ref of the frozen reference policy; None without a KL term."""
