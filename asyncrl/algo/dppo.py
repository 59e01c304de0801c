"""DPPO: tokens are silenced by how far their probability moved, not by its ratio.

    l_t = -M_t sg[min(r_t, cap)] A_t log pi_theta(t)        gradient -w_t M_t min(r_t, cap) A_t
    r_t = p / q,   p = pi_theta(t),   q = mu(t) (anchor = "behaviour") or pi_prox(t) ("proximal")

    M_t = 0  if  A_t > 0,  p > q  and  D(q, p) > high
             or  A_t < 0,  p < q  and  D(q, p) > low,       else 1
    D   = |p - q|                                           divergence = "tv"
          q log(q / p) + (1 - q) log((1 - q) / (1 - p))     divergence = "kl"

D is the divergence of "this token or another", two outcomes. A ratio bound allows a token of probability
0.9 to take or lose almost everything, and forbids one of 1e-4 to double; D treats them by what they move.

| region                             | gradient in log pi_theta(t) | counted as         |
|------------------------------------|-----------------------------|--------------------|
| M = 0: already moved in A's direction too far | 0                | ratio/masked       |
| r > cap                            | -w cap A                    | ratio/clipped_high |
| elsewhere                          | -w r A                      |                    |

Guards: guards.py; 1 - p is floored at 1e-30 in the logarithm. Defaults: anchor "behaviour" (the paper's
preference), low = high = 0.2 for tv (SkyRL, prime-rl) and 0.05 for kl (SkyRL), cap 20 (verl).

Source: arXiv:2602.04879.
"""

from typing import Literal

import torch
from torch import Tensor

from asyncrl.algo.guards import bounded_exp, clean, num_beyond, weighted_mean
from asyncrl.algo.tokens import TokenBatch

_SMALLEST_COMPLEMENT = 1e-30


def dppo_loss(
    batch: TokenBatch,
    *,
    num_tokens: int,
    divergence: Literal["tv", "kl"],
    max_fall: float,
    max_rise: float,
    cap: float,
    anchor: Literal["proximal", "behaviour"],
) -> tuple[Tensor, dict[str, Tensor]]:
    """See the module; low is max_fall and high is max_rise, both > 0; cap >= 1."""
    tokens = clean(batch)
    current = tokens.logprobs.detach()
    reference = tokens.proximal if anchor == "proximal" else tokens.behaviour
    distance = _total_variation if divergence == "tv" else _binary_kl
    moved = distance(reference, current)
    risen = (tokens.advantages > 0) & (current > reference) & (moved > max_rise)
    fallen = (tokens.advantages < 0) & (current < reference) & (moved > max_fall)
    masked = risen | fallen
    log_ratio = current - reference
    ratio = bounded_exp(log_ratio)
    pull = ratio.clamp(max=cap).masked_fill(masked, 0.0)
    return weighted_mean(
        tokens,
        -pull * tokens.advantages * tokens.logprobs,
        num_tokens=num_tokens,
        masked=masked.sum(),
        clipped_high=(~masked & (ratio > cap)).sum(),
        clamped=num_beyond(log_ratio),
    )


def _total_variation(reference: Tensor, current: Tensor) -> Tensor:
    return (current.exp() - reference.exp()).abs()


def _binary_kl(reference: Tensor, current: Tensor) -> Tensor:
    # 1 - e^x cancels near x = 0; -expm1(x) does not.
    rest = (-torch.expm1(reference)).clamp(min=_SMALLEST_COMPLEMENT)
    current_rest = (-torch.expm1(current)).clamp(min=_SMALLEST_COMPLEMENT)
    return reference.exp() * (reference - current) + rest * (rest.log() - current_rest.log())
