"""Advantages: how much better a completion scored than its group. One group at a time, float64.

    mean_std        A_i = (r_i - mean) / (std + 1e-4)    std with ddof 1   arXiv:2402.03300
    mean            A_i = r_i - mean                                       arXiv:2503.20783
    leave_one_out   A_i = r_i - mean of the others = n/(n-1) (r_i - mean)  arXiv:2402.14740

NaN means "not scored": it is outside mean and spread, and gets advantage 0. A group with fewer than
two scores has nothing to compare with, and one whose scores are all equal teaches nothing:
exactly 0.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Advantage = Callable[[Scores], Scores]
"""[G] scores, NaN where unscored -> [G] advantages, 0 where unscored."""

STD_FLOOR = 1e-4
"""Added to the spread, so that scores differing only by rounding give no large advantages."""


def mean_std(scores: Scores) -> Scores:
    """Centred on the group's mean and divided by its sample standard deviation plus 1e-4."""
    centred, num_scored = _centre(scores)
    if num_scored < 2:
        return centred
    spread = np.sqrt(np.square(centred).sum() / (num_scored - 1))
    return centred / (spread + STD_FLOOR)


def mean(scores: Scores) -> Scores:
    """Centred on the group's mean."""
    return _centre(scores)[0]


def leave_one_out(scores: Scores) -> Scores:
    """Centred on the mean of the group's other scores."""
    centred, num_scored = _centre(scores)
    if num_scored < 2:
        return centred
    return centred * (num_scored / (num_scored - 1))


def _centre(scores: Scores) -> tuple[Scores, int]:
    """Scores minus their mean (0 where unscored, or where all are equal), and the number scored."""
    scored = ~np.isnan(scores)
    num_scored = int(scored.sum())
    centred = np.zeros(scores.shape, np.float64)
    # The mean of equal floats may be off by one rounding (0.1 three times): ask first.
    if num_scored >= 2 and np.ptp(scores[scored]) > 0:
        centred[scored] = scores[scored] - scores[scored].mean()
    return centred, num_scored
