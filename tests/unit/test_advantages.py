"""Advantages: the three formulas, and what an unscored rollout or an equal group gives."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo import ADVANTAGES

scores = st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=2, max_size=9)


def slow(name: str, scored: list[float]) -> list[float]:
    """Two or more scores that differ."""
    centre = statistics.fmean(scored)
    if name == "mean":
        return [s - centre for s in scored]
    if name == "mean_std":
        return [(s - centre) / (statistics.stdev(scored) + 1e-4) for s in scored]
    others = [[t for j, t in enumerate(scored) if j != i] for i in range(len(scored))]
    return [s - statistics.fmean(rest) for s, rest in zip(scored, others, strict=True)]


@pytest.mark.parametrize("name", ADVANTAGES)
@given(values=scores.filter(lambda v: max(v) > min(v)), holes=st.sets(st.integers(0, 10)))
def test_unscored_rollouts_get_0_and_the_others_equal_the_smaller_group(name, values, holes):
    # F067: NaN is outside mean and spread.
    with_holes = list(values)
    for position in sorted(holes):
        with_holes.insert(min(position, len(with_holes)), math.nan)
    found = ADVANTAGES[name](np.array(with_holes))
    kept = [a for a, s in zip(found, with_holes, strict=True) if not math.isnan(s)]
    assert kept == pytest.approx(slow(name, values), rel=1e-9, abs=1e-9)
    assert all(a == 0 for a, s in zip(found, with_holes, strict=True) if math.isnan(s))


@pytest.mark.parametrize("name", ADVANTAGES)
@given(value=st.floats(-5, 5), size=st.integers(1, 9), num_holes=st.integers(0, 3))
def test_equal_scores_give_exactly_0(name, value, size, num_holes):
    found = ADVANTAGES[name](np.array([value] * size + [math.nan] * num_holes))
    assert found.tolist() == [0.0] * (size + num_holes)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("values", [[], [math.nan], [3.0], [math.nan, 3.0, math.nan]])
def test_fewer_than_two_scores_give_0(name, values):
    assert ADVANTAGES[name](np.array(values, np.float64)).tolist() == [0.0] * len(values)


def test_an_unscorable_answer_among_failures_is_not_reinforced():
    # [-1, -1, 0.5]: mean -0.5, sample std sqrt((0.25 + 0.25 + 1) / 2) = 0.866025...
    found = ADVANTAGES["mean_std"](np.array([math.nan, -1.0, -1.0, 0.5]))
    scale = math.sqrt(0.75) + 1e-4
    assert found.tolist() == pytest.approx([0, -0.5 / scale, -0.5 / scale, 1 / scale])


def test_scores_that_differ_by_rounding_get_small_advantages():
    # Spread 2^-20 / sqrt(2) = 6.7e-7 against the 1e-4 that is added.
    found = ADVANTAGES["mean_std"](np.array([1.0, 1.0 + 2.0**-20]))
    assert np.abs(found).max() < 0.01
