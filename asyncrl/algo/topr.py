"""TOPR: good completions are imitated; bad ones are pushed away while the policy would still say them.

    l_t = -W_t A_t log pi_theta(t)                          gradient -W_t A_t
    W_t = 1                                 if A_t > 0
          sg[min(pi_theta(y) / mu(y), cap)] if A_t < 0;     pi(y): product over the completion's tokens

Imitation needs no importance weight to be safe. Pushing down without one is unbounded: a completion that
the policy left long ago would be pushed for ever. The ratio of whole completions goes to 0 there, and
with it the push. It holds mu already: the config refuses a correction's weight on top.

| region                        | gradient in log pi_theta(t)    | counted as         |
|-------------------------------|--------------------------------|--------------------|
| A > 0                         | -A                             |                    |
| A < 0, pi(y) / mu(y) > cap    | -cap A                         | ratio/capped       |
| A < 0, otherwise              | -A pi(y) / mu(y)               |                    |

A cap of 1 acts on about half of the bad completions even where the policies agree: ratio/capped says
where the ratio lies, not that an update went too far.

Guards: guards.py; the summed log-ratio is clamped to +-20. Default: cap 1 (the paper's [0, 1]).

Source: arXiv:2503.14286 eq. 7 and 8.
"""

import torch
from torch import Tensor

from asyncrl.algo.guards import (
    bounded_exp,
    clean,
    num_beyond,
    sum_by_sequence,
    weighted_mean,
)
from asyncrl.algo.tokens import TokenBatch


def topr_loss(
    batch: TokenBatch, *, num_tokens: int, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """See the module; cap > 0."""
    tokens = clean(batch)
    log_ratio = sum_by_sequence(tokens.logprobs.detach() - tokens.behaviour, tokens.sequence)
    ratio = bounded_exp(log_ratio)
    negative = tokens.advantages < 0
    weight = torch.where(negative, ratio.clamp(max=cap), 1.0)
    return weighted_mean(
        tokens,
        -weight * tokens.advantages * tokens.logprobs,
        num_tokens=num_tokens,
        capped=(negative & (ratio > cap)).sum(),
        clamped=num_beyond(log_ratio.where(tokens.counts, 0.0)),
    )
