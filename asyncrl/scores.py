"""Whether the scores of a group differ: one rule for the broker, who may drop it, and for the metrics."""

import math
from collections.abc import Sequence
from typing import Literal

ZERO_SIGNAL_TOLERANCE = 1e-6
"""Scores closer together than this are equal."""


def judge(scores: Sequence[float | None]) -> Literal["signal", "zero_signal", "unscored"]:
    """What a group's scores can teach; None and non-finite scores say nothing.

    A single score has nothing to be compared with: zero_signal.
    """
    known = [s for s in scores if s is not None and math.isfinite(s)]
    if not known:
        return "unscored"
    return "zero_signal" if max(known) - min(known) < ZERO_SIGNAL_TOLERANCE else "signal"
