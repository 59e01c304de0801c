"""Regression instead of importance sampling: imitate by advantage, and be pulled back to mu.

    l_t = -A_t log pi_theta(t) + beta/2 z_t^2,      z_t = log(pi_theta(t) / mu(t))
    gradient  -A_t + beta z_t

A token's loss is least at z = A / beta: that far the policy may leave mu, with no ratio that could grow.
The penalty is what handles staleness, so the config refuses a correction's weight. It pulls tokens of
advantage 0 as well: they are not left out of the step.

| region | gradient in log pi_theta(t)  |
|--------|------------------------------|
| all    | -A + beta z; not clamped, since nothing is exponentiated |

Guards: guards.py. Default: beta 0.1 (Kimi k1.5's tau as ROLL sets it).

Sources: arXiv:2501.12599 sec. 2.3.2; DRO, arXiv:2405.19107; at large staleness (OAPL), arXiv:2602.19362.
"""

from torch import Tensor

from asyncrl.algo.guards import clean, weighted_mean
from asyncrl.algo.tokens import TokenBatch


def squared_log_ratio_loss(
    batch: TokenBatch, *, num_tokens: int, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """See the module; beta > 0, per nat."""
    tokens = clean(batch)
    penalty = beta / 2 * (tokens.logprobs - tokens.behaviour).square()
    return weighted_mean(
        tokens, penalty - tokens.advantages * tokens.logprobs, num_tokens=num_tokens
    )
