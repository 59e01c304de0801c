"""Confidence intervals over a handful of seeds.

t_interval: mean +- t(0.975; n - 1) s / sqrt(n), Student's interval of a mean. Exact for normal values;
differences of paired runs that come from one distribution are symmetric whatever it is, which is the
case that decides how often a difference is claimed that is none. A verdict rests on it.

percentile_interval: quantiles of the means of resamples (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, ch. 13); bands of figures, ends of tables. No verdict rests on it: no resample reaches
beyond the data, and where nothing differs its 95 % interval excludes 0 for 3, 5 and 8 seeds in a quarter,
a sixth and an eighth of all sweeps instead of a twentieth (analysis/results/sweep_rule_study.json).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `num` seeds and the half width of its interval."""

    mean: float
    half_width: float
    num: int

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half_width


def percentile_interval(
    values: Sequence[float], rng: np.random.Generator, *, level: float = LEVEL
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values` (at least one).

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("the interval of a mean needs at least one value")
    given = np.asarray(values, dtype=np.float64)
    drawn = rng.integers(given.size, size=(NUM_RESAMPLES, given.size))
    low, high = np.quantile(given[drawn].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def t_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval:
    """Student's interval of the mean of `values`; equal values have one of no width.

    Raises:
        ValueError: fewer than 2 values.
    """
    num = len(values)
    if num < 2:
        raise ValueError(f"an interval of a mean needs 2 values or more, got {num}")
    t = student_quantile((1 + level) / 2, num - 1)
    return Interval(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(num), num)


def student_quantile(probability: float, freedom: int) -> float:
    """The t with P(T <= t) = `probability`, from 0.5 to below 1; to 1e-9 of its size."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return high


def student_cdf(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0 (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term, total = 1.0, 0.0
    for index in range(freedom // 2):
        total += term
        factor = 2 * index + 1 + freedom % 2
        term *= square * factor / (factor + 1)
    if freedom % 2 == 0:
        return 0.5 + sine * total / 2
    return 0.5 + (angle + sine * math.cos(angle) * total) / math.pi
