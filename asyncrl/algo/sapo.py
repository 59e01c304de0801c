"""SAPO: a sigmoid gate instead of a clip; a token's pull fades the further its ratio is from 1.

    l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t         tau = tau_positive if A_t > 0 else tau_negative
    r_t = pi_theta(t) / pi_prox(t)                      carries the gradient

With g = sigmoid(tau (r - 1)) the gradient is -4 g (1 - g) r A: PPO's at r = 1, smooth, and decaying both
ways. A larger tau decays faster; negative advantages get the larger one, since pushing a token down
raises many others and is the less stable direction.

| region        | gradient in log pi_theta(t)    | counted as   |
|---------------|--------------------------------|--------------|
| r near 1      | -w r A                         |              |
| r >> 1        | towards 0                      |              |
| r << 1        | -w r A 4 g (1 - g), towards 0  |              |

Guards: guards.py; the sigmoid cannot overflow. Defaults: tau_positive 1, tau_negative 1.05; in the paper
with the aggregation "sequence_mean".

Source: arXiv:2511.20347 eq. 5-7.
"""

import torch
from torch import Tensor

from asyncrl.algo.guards import bounded_exp, clean, num_beyond, weighted_mean
from asyncrl.algo.tokens import TokenBatch


def sapo_loss(
    batch: TokenBatch, *, num_tokens: int, tau_positive: float, tau_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """See the module; both tau > 0."""
    tokens = clean(batch)
    log_ratio = tokens.logprobs - tokens.proximal
    advantages = tokens.advantages
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    distance = tau * (bounded_exp(log_ratio) - 1)
    # Far above 1 the slope g (1 - g) cancels unless it is taken of 1 - g.
    gate = torch.where(distance > 0, 1 - (-distance).sigmoid(), distance.sigmoid())
    return weighted_mean(
        tokens, -4 / tau * gate * advantages, num_tokens=num_tokens, clamped=num_beyond(log_ratio)
    )
