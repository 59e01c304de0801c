"""M2PO: the importance ratio with its most stale tokens masked, by a budget on the second moment.

    l_t = -M_t R_t A_t,   R_t = pi_theta(t) / mu(t)         carries the gradient
    M   : of each completion the tokens with the largest z_t^2, z_t = log R_t, are masked until
          mean of z_t^2 over the rest <= budget;  one token is always kept

A clip acts on all tokens beyond a bound, however many; the budget acts only when the completion as a
whole is too far off, and then on few. R_t holds mu already: the config refuses a correction's weight.

The budget is kept per completion, where the paper's is per batch: a completion is never split, so the
mask cannot depend on micro-batches or ranks. Masked tokens stay in N.

| region     | gradient in log pi_theta(t)   | counted as   |
|------------|-------------------------------|--------------|
| M = 0      | 0                             | ratio/masked |
| M = 1      | -A R                          |              |

Guards: guards.py. Default: budget 0.04 (paper and AReaL). Of tokens equally far off later ones go first.

Source: arXiv:2510.01161 sec. 4; masking all tokens, not only those that move in A's direction, as AReaL.
"""

import torch
from torch import Tensor

from asyncrl.algo.guards import bounded_exp, clean, num_beyond, weighted_mean
from asyncrl.algo.tokens import TokenBatch


def m2po_loss(
    batch: TokenBatch, *, num_tokens: int, budget: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """See the module; budget > 0, nats squared."""
    tokens = clean(batch)
    log_ratio = tokens.logprobs - tokens.behaviour
    kept = _within_budget(log_ratio.detach(), tokens.counts, tokens.sequence, budget)
    # Masked before the product: an advantage that is NaN shows even at a masked token.
    token_loss = -bounded_exp(log_ratio).where(kept, 0.0) * tokens.advantages
    return weighted_mean(
        tokens,
        token_loss,
        num_tokens=num_tokens,
        masked=(tokens.counts & ~kept).sum(),
        clamped=num_beyond(log_ratio),
    )


def _within_budget(log_ratio: Tensor, counts: Tensor, sequence: Tensor, budget: float) -> Tensor:
    """[T] bool: the tokens of each completion with the smallest squares whose mean is in the budget.

    NaN is never beyond it: masking it would hide it, and the update would be made.
    """
    # Running sums over all completions are differenced: in float64 they keep enough digits.
    square = log_ratio.double().square()
    group = sequence.where(counts, len(sequence))
    by_size = square.argsort(stable=True)
    order = by_size[group[by_size].argsort(stable=True)]
    total, group = square[order].cumsum(0), group[order]
    start = torch.searchsorted(group, group)
    before = torch.cat([total.new_zeros(1), total])[start]
    num = torch.arange(1, len(order) + 1, device=order.device) - start
    kept = ~((total - before) / num > budget) | (num == 1)
    return torch.empty_like(counts).scatter(0, order, kept) & counts
