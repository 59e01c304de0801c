"""Adaptive staleness: lowers the bound when sampler and learner drift apart, raises it when they agree.

A pure class, fed once a step with two numbers over the step's tokens (algo/diagnostics.py):

    Delta = mean e^|y| - 1     relative divergence of the probabilities, y = log pi_prox - log mu
    ESS   = (sum e^y)^2 / (n sum e^2y)     effective share of the tokens, before any cap

| zone       | when                          | after                             | the bound           |
|------------|-------------------------------|-----------------------------------|---------------------|
| diverging  | Delta > 0.20 or ESS < 0.3     | 3 steps in a row                  | k - 1, not below 1  |
| calm       | Delta < 0.05 and ESS >= 0.3   | 20 steps in a row                 | k + 1, not above    |
|            |                               |                                   | the configured one  |
| between    | else                          | counts as neither; both counts    | stays               |
|            |                               | start again                       |                     |

The gap between 0.05 and 0.20 is the hysteresis: a bound that was just lowered is not raised again by
the relief that lowering it brought. A change shows in the data only after the groups admitted under
the old bound were trained, at most that many steps later; until then nothing is counted.

At a bound of 1 (or 0) there is no staleness left to take away: what still diverges is the engine's
numerics, and `engine_mismatch` says so.

That a collapse announces itself in the effective sample size: arXiv:2602.17616. All thresholds are ours.
"""

from dataclasses import dataclass

DIVERGING, CALM = 0.20, 0.05
"""Delta above the first is too much, below the second is calm."""

ESS_FLOOR = 0.3
STEPS_TO_LOWER, STEPS_TO_RAISE = 3, 20


@dataclass(frozen=True, slots=True)
class Decision:
    """What the newest step led to."""

    bound: int
    """The staleness bound from now on."""

    change: int = 0
    """-1, 0 or 1: what the bound moved by."""

    engine_mismatch: bool = False
    """The lowest bound still diverges: not staleness but engine and learner computing differently."""


class StalenessController:
    """The bound of one run; the same inputs give the same decisions on every rank."""

    def __init__(self, max_staleness: int) -> None:
        """Start at the configured bound, which is never exceeded."""
        self.bound = max_staleness
        self._highest = max_staleness
        self._lowest = min(1, max_staleness)
        self._num_diverging = self._num_calm = 0
        self._num_settling = 0

    def observe(self, *, divergence: float | None, ess: float | None) -> Decision:
        """Take a step's Delta and ESS; None if nothing was measured, which counts as no step."""
        if divergence is None or ess is None:
            return Decision(self.bound)
        if self._num_settling > 0:
            self._num_settling -= 1
            return Decision(self.bound)
        is_diverging = not (divergence <= DIVERGING and ess >= ESS_FLOOR)  # NaN diverges
        is_calm = divergence < CALM and not is_diverging
        self._num_diverging = self._num_diverging + 1 if is_diverging else 0
        self._num_calm = self._num_calm + 1 if is_calm else 0
        if self._num_diverging >= STEPS_TO_LOWER:
            if self.bound <= self._lowest:
                return Decision(self.bound, engine_mismatch=True)
            return self._move(-1)
        if self._num_calm >= STEPS_TO_RAISE and self.bound < self._highest:
            return self._move(1)
        return Decision(self.bound)

    def _move(self, change: int) -> Decision:
        self._num_settling = self.bound
        self.bound += change
        self._num_diverging = self._num_calm = 0
        return Decision(self.bound, change=change)
