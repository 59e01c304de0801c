"""CISPO: the ratio is clipped but constant, so that every token keeps a gradient.

    l_t = -sg[clip(r_t, floor, cap)] A_t log pi_theta(t)        gradient -w_t clip(r_t) A_t
    r_t = pi_theta(t) / pi_prox(t)      anchor = "proximal"
          pi_theta(t) / mu(t)           anchor = "behaviour": the whole importance ratio; no correction

PPO's clip silences the tokens that moved most, often rare ones that begin a new thought; here they go on
pulling, with a bounded weight. Bounds are absolute values of the ratio.

| region      | gradient in log pi_theta(t) | counted as         |
|-------------|-----------------------------|--------------------|
| r > cap     | -w cap A                    | ratio/clipped_high |
| r < floor   | -w floor A                  | ratio/clipped_low  |
| elsewhere   | -w r A                      |                    |

Guards: guards.py. Defaults: floor 0 (the paper only tunes the upper bound), cap 5 (TRL, ScaleRL).

Sources: arXiv:2506.13585 sec. 3.1; arXiv:2510.13786.
"""

from typing import Literal

from torch import Tensor

from asyncrl.algo.guards import bounded_exp, clean, num_beyond, weighted_mean
from asyncrl.algo.tokens import TokenBatch


def cispo_loss(
    batch: TokenBatch,
    *,
    num_tokens: int,
    floor: float,
    cap: float,
    anchor: Literal["proximal", "behaviour"],
) -> tuple[Tensor, dict[str, Tensor]]:
    """See the module; 0 <= floor <= 1 <= cap."""
    tokens = clean(batch)
    log_ratio = tokens.logprobs.detach() - (
        tokens.proximal if anchor == "proximal" else tokens.behaviour
    )
    ratio = bounded_exp(log_ratio)
    return weighted_mean(
        tokens,
        -ratio.clamp(floor, cap) * tokens.advantages * tokens.logprobs,
        num_tokens=num_tokens,
        clipped_high=(tokens.counts & (ratio > cap)).sum(),
        clipped_low=(tokens.counts & (ratio < floor)).sum(),
        clamped=num_beyond(log_ratio),
    )
