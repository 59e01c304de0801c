"""Policy gradient with the weight that the correction gives, and no trust region of its own.

    l_t = -A_t log pi_theta(t)          gradient -w_t A_t

What this is depends on the correction:

| correction                     | name                                                          |
|--------------------------------|---------------------------------------------------------------|
| none                           | REINFORCE; unbiased only when mu = pi_theta                   |
| token weight capped at C       | AIPO: with one update per batch w_t = min(pi_theta / mu, C)   |
| completion weight              | REINFORCE with sequence-level importance sampling             |

The weight must be constant: w_t(theta) log pi_theta would add the term log pi_theta grad w_t. Only the
gradient of this loss is comparable with a ratio form's, its value is not.

Guards: guards.py. No settings; AIPO's published caps are about 2 to 10.

Sources: Williams 1992; AIPO, arXiv:2505.24034.
"""

from torch import Tensor

from asyncrl.algo.guards import clean, weighted_mean
from asyncrl.algo.tokens import TokenBatch


def reinforce_loss(batch: TokenBatch, *, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """See the module."""
    tokens = clean(batch)
    return weighted_mean(tokens, -tokens.advantages * tokens.logprobs, num_tokens=num_tokens)
