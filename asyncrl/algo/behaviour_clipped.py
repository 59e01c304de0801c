"""PPO around the behaviour policy: one ratio for staleness and update alike, no behaviour weight.

    l_t = -min(R_t A_t, clip(R_t, 1 - low, 1 + high) A_t),  and for A_t < 0:  min(l_t, c |A_t|)
    R_t = pi_theta(t) / mu(t)           carries the gradient

R_t already is the whole importance ratio, so a correction's weight on top would count pi_prox / mu twice:
the config refuses it. For stale tokens R_t starts away from 1: part of the batch begins in the flat
region, the more the larger k is.

| region                   | gradient in log pi_theta(t)   | counted as         |
|--------------------------|-------------------------------|--------------------|
| A > 0 and R > 1 + high   | 0                             | ratio/clipped_high |
| A < 0 and R < 1 - low    | 0                             | ratio/clipped_low  |
| A < 0 and R > c          | 0                             | ratio/dual_clipped |
| elsewhere                | -A R                          |                    |

Guards: guards.py. Defaults: low 0.2, high 0.2 (TRL's asynchronous trainer, PipelineRL), c 3 (verl's
"bypass" mode).

Sources: clip, arXiv:1707.06347 eq. 7; the behaviour policy as the better anchor, arXiv:2602.04879.
"""

from torch import Tensor

from asyncrl.algo.clipped import clipped_around
from asyncrl.algo.guards import clean
from asyncrl.algo.tokens import TokenBatch


def behaviour_clipped_loss(
    batch: TokenBatch, *, num_tokens: int, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """See the module; settings as in clipped_loss."""
    tokens = clean(batch)
    return clipped_around(tokens, tokens.behaviour, num_tokens, clip_low, clip_high, dual_clip)
