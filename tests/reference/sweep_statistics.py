"""Slow restatements of a sweep's statistics, from definitions and printed tables."""

import itertools
import math
from collections.abc import Mapping, Sequence

T_975 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 9: 2.262}
"""Printed table of Student's t, two-sided 5 %, by degrees of freedom."""


def student_probability(t: float, freedom: int, *, num_pieces: int = 20_000) -> float:
    """P(T <= t), t >= 0, by the midpoint rule over the density."""
    scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    width = t / num_pieces
    heights = (
        (1 + ((i + 0.5) * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(num_pieces)
    )
    return 0.5 + scale * width * math.fsum(heights)


def all_resampled_means(values: Sequence[float]) -> list[float]:
    """The mean of each of the n^n resamples, ascending."""
    n = len(values)
    return sorted(math.fsum(picked) / n for picked in itertools.product(values, repeat=n))


def claimed(
    scores: Mapping[tuple[int, int], float], ks: Sequence[int], seeds: int
) -> dict[int, str]:
    """Which k > ks[0] is worse or better: every k from it upward has to differ by itself.

    Closed form of the step-down rule: k is claimed iff no k' >= k lies within its own interval.
    """

    def differs(k: int) -> bool:
        d = [scores[k, s] - scores[ks[0], s] for s in range(seeds)]
        mean = sum(d) / seeds
        variance = sum((x - mean) ** 2 for x in d) / (seeds - 1)
        return mean**2 > T_975[seeds - 1] ** 2 * variance / seeds

    def mean_of(k: int) -> float:
        return sum(scores[k, s] for s in range(seeds)) / seeds

    return {
        k: "open" if not all(differs(upper) for upper in ks if upper >= k)
        else "worse" if mean_of(k) < mean_of(ks[0]) else "better"
        for k in ks[1:]
    }  # fmt: skip
