"""What a loss may read: one packed micro-batch, token by token.

Shapes: T = completion tokens of one micro-batch (padding may be among them, masked out).
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
