"""Clipped policy gradient, corrected for the policy that sampled the tokens.

    L   = 1/N sum_t  w_t * l_t
    l_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t),  and for A_t < 0:  min(l_t, c |A_t|)
    r_t = pi_theta(t) / pi_prox(t)     gradient flows here; clipped around the proximal policy
    w_t = min(C, pi_prox(t) / mu(t))   constant; truncated importance sampling (TIS)

One ratio cannot do both jobs: clipping around mu would clip for being stale, not for moving too
far. With one update per batch the caller passes proximal_logprobs = logprobs.detach(): r_t is 1 and
the gradient is exactly -w_t A_t grad log pi_theta / N.

| value                                             | what happens                               |
|---------------------------------------------------|--------------------------------------------|
| anything where completion_mask is False           | never read: loss finite, gradient exactly 0|
| behaviour log-prob not finite, inside the mask    | weight 0, still in N, counted              |
| |log r| or |log w| above 20                       | clamped before exp (no gradient), counted |
| learner's log-prob or advantage not finite        | propagates; the step is then skipped       |
| empty mask                                        | 0, connected to the graph                  |

Sources: PPO clip, arXiv:1707.06347 eq. 7. Proximal and behaviour policies kept apart,
arXiv:2110.00641 sec. 3. Unequal bounds, arXiv:2503.14476 sec. 3.1. Dual clip, arXiv:1912.09729 eq.
5. Truncation, arXiv:1802.01561 (rho-bar in V-trace).
"""

import torch
from torch import Tensor

from asyncrl.algo.tokens import TokenBatch

MAX_LOG_RATIO = 20.0
"""Nats; e^20 is far beyond any clip, and its square is still finite in float32."""


def clipped_loss(
    batch: TokenBatch,
    *,
    num_tokens: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    tis_cap: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch, already divided by the step's token count.

    Args:
        batch: the micro-batch.
        num_tokens: N, completion tokens of the whole step over all ranks and micro-batches, counted
            before any rejection: micro-batch losses add up to the step's however it was cut.
        clip_low: r is clipped from below at 1 - clip_low.
        clip_high: r is clipped from above at 1 + clip_high.
        dual_clip: c > 1; bounds the loss of tokens with a negative advantage.
        tis_cap: C > 0.

    Returns:
        The scalar loss (nats per token of the step), and sums over this micro-batch's completion
        tokens by metric name; loss/policy is the sum of w_t l_t.

    Raises:
        ValueError: num_tokens < 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must count the step's tokens, at least 1, got {num_tokens}")
    mask = batch.completion_mask
    logprobs = batch.logprobs.where(mask, 0.0)
    proximal = batch.proximal_logprobs.detach().where(mask, 0.0)
    advantages = batch.advantages.where(mask, 0.0)
    finite = batch.behaviour_logprobs.isfinite()

    log_ratio = logprobs - proximal
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    log_weight = proximal - batch.behaviour_logprobs.where(mask & finite, proximal)
    behaviour_ratio = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = behaviour_ratio.clamp(max=tis_cap).where(mask & finite, 0.0)

    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    token_loss = -torch.minimum(ratio * advantages, clipped)
    token_loss = torch.where(
        advantages < 0, torch.minimum(token_loss, -dual_clip * advantages), token_loss
    )
    weighted = (weight * token_loss).sum()

    with torch.no_grad():
        beyond = (log_ratio.abs() > MAX_LOG_RATIO) | (log_weight.abs() > MAX_LOG_RATIO)
        sums = {
            "loss/policy": weighted.detach(),
            "ratio/clipped_high": ((advantages > 0) & (ratio > 1 + clip_high)).sum(),
            "ratio/clipped_low": ((advantages < 0) & (ratio < 1 - clip_low)).sum(),
            "ratio/dual_clipped": ((advantages < 0) & (ratio > dual_clip)).sum(),
            "tis/weight": weight.sum(),
            "tis/truncated": (mask & finite & (behaviour_ratio > tis_cap)).sum(),
            "mismatch/nonfinite": (mask & ~finite).sum(),
            "mismatch/clamped": (mask & beyond).sum(),
        }
    return weighted / num_tokens, sums
