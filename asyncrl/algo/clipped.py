"""Decoupled PPO: a clip around the proximal policy, a behaviour weight for the policy that sampled.

    l_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t),  and for A_t < 0:  min(l_t, c |A_t|)
    r_t = pi_theta(t) / pi_prox(t)      carries the gradient
    L   = 1/N sum_t scale_t w_t l_t     w_t: the correction's, outside the min

One ratio cannot do both jobs: clipping around mu would clip for being stale, not for moving too far.
With one update per batch pi_prox is this very pass: r_t = 1, the clip is inert and the gradient is
exactly -w_t A_t grad log pi_theta.

| region                   | gradient in log pi_theta(t)                  | counted as            |
|--------------------------|----------------------------------------------|-----------------------|
| A > 0 and r > 1 + high   | 0: moved far enough                          | ratio/clipped_high    |
| A < 0 and r < 1 - low    | 0: moved far enough                          | ratio/clipped_low     |
| A < 0 and r > c          | 0: a bounded loss where r A is not (two-sided delta) | ratio/dual_clipped |
| elsewhere                | -w A r                                       |                       |

Guards: guards.py. Defaults: low 0.2, high 0.28 (DAPO), c 3 (dual clip).

Sources: clip, arXiv:1707.06347 eq. 7. Proximal and behaviour policies kept apart, arXiv:2110.00641
sec. 3. Unequal bounds, arXiv:2503.14476 sec. 3.1. Dual clip, arXiv:1912.09729 eq. 5.
"""

import torch
from torch import Tensor

from asyncrl.algo.guards import CleanTokens, bounded_exp, clean, num_beyond, weighted_mean
from asyncrl.algo.tokens import TokenBatch


def clipped_loss(
    batch: TokenBatch, *, num_tokens: int, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """See the module; the contract of a loss is in tokens.py.

    Args:
        batch: the micro-batch.
        num_tokens: N.
        clip_low: r is clipped from below at 1 - clip_low.
        clip_high: r is clipped from above at 1 + clip_high.
        dual_clip: c > 1.
    """
    tokens = clean(batch)
    return clipped_around(tokens, tokens.proximal, num_tokens, clip_low, clip_high, dual_clip)


def clipped_around(
    tokens: CleanTokens,
    anchor: Tensor,
    num_tokens: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss with the ratio pi_theta / anchor; `anchor` is [T] constant log-probs."""
    log_ratio = tokens.logprobs - anchor
    ratio, advantages = bounded_exp(log_ratio), tokens.advantages
    token_loss = clip(ratio, advantages, clip_low, clip_high)
    bounded = torch.minimum(token_loss, -dual_clip * advantages)
    return weighted_mean(
        tokens,
        torch.where(advantages < 0, bounded, token_loss),
        num_tokens=num_tokens,
        clipped_high=((advantages > 0) & (ratio > 1 + clip_high)).sum(),
        clipped_low=((advantages < 0) & (ratio < 1 - clip_low)).sum(),
        dual_clipped=((advantages < 0) & (ratio > dual_clip)).sum(),
        clamped=num_beyond(log_ratio),
    )


def clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's pessimistic loss of each token, before any dual clip."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
