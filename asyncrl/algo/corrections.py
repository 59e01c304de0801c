"""Off-policy correction: the constant weight that a token's loss gets for who really sampled it.

    y_t   = log pi_prox(t) - log mu(t)     constant; 0 where mu is not known
    rho_t = exp y_t                        pi_prox / mu, never mu / pi_prox
    w_t   = bounded(raw_t) * token mask_t * sequence kept_i

| part      | setting      | raw_t, or what gives weight 0                                        |
|-----------|--------------|----------------------------------------------------------------------|
| weight    | none         | 1                                                                    |
|           | token        | rho_t                                          (token TIS)           |
|           | sequence     | exp sum_s y_s, the same for the whole completion (sequence TIS)      |
| bounds    | low, cap     | raw raised to low, cut down to cap                                   |
| mask      | mask_low/high| a token whose rho_t lies outside               (IcePop, rejection)   |
| reject    | product      | a completion whose exp sum_s y_s lies outside reject_low..high       |
|           | geometric    | the same with exp mean_s y_s: does not drift with length             |
|           | k3           | a completion whose mean_s(e^y - 1 - y) exceeds reject_high           |
| veto      | on           | a completion with any rho_t outside [1e-4, 100]                      |
| opsm      | delta        | a completion with A < 0 and mean_s(-y_s) > delta                     |

Sums and means run over a completion's trained tokens only, never over padding, and are clamped to
+-20 before exp (the sum, not its terms). A rejected token keeps its place in the loss's denominator.
A behaviour log-prob that is not finite gives weight 0 and counts nowhere else.

What each costs: token weights are biased from the second token on (states are still mu's) and their
variance is at most C^2; sequence weights are unbiased before truncation, and their variance is
exponential in the length. Rejection filters and corrects nothing.

Sources: truncation, arXiv:1802.01561 (V-trace) and fengyao.notion.site/off-policy-rl; decoupling,
arXiv:2110.00641; IcePop, ringtech.notion.site/icepop; OPSM, arXiv:2512.02556 sec. 3.1.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncrl.algo.guards import MAX_LOG_RATIO, bounded_exp, num_beyond
from asyncrl.algo.tokens import TokenBatch

Level = Literal["none", "token", "sequence"]
Statistic = Literal["none", "product", "geometric", "k3"]

VETO_LOW, VETO_HIGH = 1e-4, 100.0
"""One token this far off says that the two policies are not versions of each other there."""


class Correction(NamedTuple):
    """Weights of one micro-batch and what was done to it."""

    weights: Tensor
    """[T] constant, >= 0; 0 outside the mask."""

    sums: dict[str, Tensor]
    """By metric name: over completion tokens, or over completions for the last three."""


class _Sequences:
    """The completions of a micro-batch; per-completion values live in slots 0..T-1."""

    def __init__(self, index: Tensor, trained: Tensor) -> None:
        # As many slots as tokens, so that nothing has to be read back from the device.
        self._index = index
        self.sizes = self.total(trained.double())
        self.present = self.sizes > 0

    def total(self, values: Tensor) -> Tensor:
        """Sum of [T] values per completion, in float64: ten thousand terms keep their digits."""
        slots = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        return slots.index_add_(0, self._index, values.double())

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the trained tokens; values must be 0 elsewhere."""
        return self.total(values) / self.sizes.clamp(min=1)

    def spread(self, slots: Tensor) -> Tensor:
        """[T] each token's completion's value."""
        return slots[self._index]


@torch.no_grad()
def correct(
    batch: TokenBatch,
    *,
    weight: Level = "none",
    low: float = 0.0,
    cap: float = 0.0,
    mask_low: float = 0.0,
    mask_high: float = 0.0,
    reject: Statistic = "none",
    reject_low: float = 0.0,
    reject_high: float = 0.0,
    veto: bool = False,
    opsm_delta: float = 0.0,
) -> Correction:
    """Weights for `batch.behaviour_weights`; every part that is not asked for does nothing.

    Args:
        batch: the micro-batch; its completions must be whole, behaviour_weights is not read.
        weight: level of the importance weight.
        low: weights below are raised to it; 0 leaves them.
        cap: weights above are cut down to it; 0 leaves them.
        mask_low: tokens with rho below get weight 0.
        mask_high: tokens with rho above get weight 0; 0 sets no bound.
        reject: statistic that a completion is judged by.
        reject_low: completions with less are dropped (product, geometric).
        reject_high: completions with more are dropped; 0 sets no bound.
        veto: drop completions with a single absurd ratio.
        opsm_delta: nats; 0 is off.
    """
    trained = batch.completion_mask & batch.behaviour_logprobs.isfinite()
    log_ratio = (batch.proximal_logprobs - batch.behaviour_logprobs).where(trained, 0.0)
    ratio = bounded_exp(log_ratio)
    sequences = _Sequences(batch.sequence, trained)

    raw = _raw_weights(weight, log_ratio, sequences)
    truncated, raised = _above(raw, cap), raw < low
    masked_low, masked_high = ratio < mask_low, _above(ratio, mask_high)
    rejected = _rejected(reject, log_ratio, sequences, reject_low, reject_high)
    vetoed = sequences.total((ratio < VETO_LOW) | (ratio > VETO_HIGH)) * veto > 0
    pushed_down = sequences.total(batch.advantages.where(trained, 0.0)) < 0
    opsm = pushed_down & _above(sequences.mean(-log_ratio), opsm_delta)

    kept = ~masked_low & ~masked_high & ~sequences.spread(rejected | vetoed | opsm)
    weights = raw.where(~truncated, cap).where(~raised, low).where(trained & kept, 0.0)
    sums = {
        "correction/weight": weights.sum(),
        "correction/truncated": (trained & truncated).sum(),
        "correction/raised": (trained & raised).sum(),
        "correction/masked_low": (trained & masked_low).sum(),
        "correction/masked_high": (trained & masked_high).sum(),
        "correction/dropped": (batch.completion_mask & (weights == 0)).sum(),
        "correction/sequences": sequences.present.sum(),
        "correction/rejected_sequences": (sequences.present & rejected).sum(),
        "correction/vetoed_sequences": (sequences.present & vetoed).sum(),
        "correction/opsm_sequences": (sequences.present & opsm).sum(),
        "mismatch/clamped": num_beyond(log_ratio),
    }
    return Correction(weights, sums)


def _raw_weights(level: Level, log_ratio: Tensor, sequences: _Sequences) -> Tensor:
    """[T] before any bound."""
    if level == "token":
        return bounded_exp(log_ratio)
    if level == "sequence":
        product = bounded_exp(sequences.total(log_ratio))
        return sequences.spread(product).to(log_ratio.dtype)
    return torch.ones_like(log_ratio)


def _rejected(
    kind: Statistic, log_ratio: Tensor, sequences: _Sequences, low: float, high: float
) -> Tensor:
    """Which completions are judged too far off."""
    if kind == "none":
        return torch.zeros_like(sequences.present)
    if kind == "product":
        statistic = bounded_exp(sequences.total(log_ratio))
    elif kind == "geometric":
        statistic = bounded_exp(sequences.mean(log_ratio))
    else:
        # expm1: e^y - 1 - y cancels near 0, where healthy runs are.
        clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        statistic = sequences.mean(clamped.expm1() - clamped)
    return (statistic < low) | _above(statistic, high)


def _above(values: Tensor, bound: float) -> Tensor:
    """Where values exceed a bound; 0 is no bound."""
    return values > bound if bound > 0 else torch.zeros_like(values, dtype=torch.bool)
