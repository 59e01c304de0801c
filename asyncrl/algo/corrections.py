"""What a token's loss is multiplied with, because mu sampled it and pi_prox is trained.

    w_t = min(pi_prox(t) / mu(t), C)        weight = "token": truncated importance sampling (TIS)
    w_t = 1                                 weight = "none"

A token whose behaviour log-prob is not finite gets weight 0. Source: arXiv:1802.01561 (rho-bar).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncrl.algo.guards import bounded_exp, num_beyond
from asyncrl.algo.tokens import TokenBatch


class Correction(NamedTuple):
    """Weights, and sums over the micro-batch by metric name."""

    weights: Tensor
    """[T] constant."""

    sums: dict[str, Tensor]


@torch.no_grad()
def correct(batch: TokenBatch, *, weight: Literal["none", "token"], cap: float) -> Correction:
    """Weights of a micro-batch; its behaviour_weights are not read."""
    counts = batch.completion_mask & batch.behaviour_logprobs.isfinite()
    if weight == "none":
        return Correction(counts.to(batch.logprobs.dtype), {})
    log_weight = (batch.proximal_logprobs - batch.behaviour_logprobs).where(counts, 0.0)
    ratio = bounded_exp(log_weight)
    weights = ratio.clamp(max=cap).where(counts, 0.0)
    return Correction(
        weights,
        {
            "correction/weight": weights.sum(),
            "correction/truncated": (counts & (ratio > cap)).sum(),
            "mismatch/clamped": num_beyond(log_weight),
        },
    )
