"""Advantages against their formulas written out, and what an unscored rollout or equal group gives."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo import ADVANTAGES
from asyncrl.algo.advantages import overlong_penalty, with_overlong_penalty

COMPARING = [name for name in ADVANTAGES if name != "raw"]

score = st.floats(0, 5, allow_subnormal=False)
rollout = st.tuples(st.one_of(score, st.just(math.nan)), st.integers(0, 50))
group = st.lists(rollout, max_size=6)


def slow(name, groups):
    """Each group's advantages, one rollout at a time; groups are lists of (score, length)."""
    everything = [s for members in groups for s, _ in members if not math.isnan(s)]
    deviation = statistics.stdev(everything) if len(everything) > 1 else 0.0
    return [[_slow_one(name, s, members, deviation) for s, _ in members] for members in groups]


def _slow_one(name, own, members, batch_deviation):
    scored = [(s, length) for s, length in members if not math.isnan(s)]
    values = [s for s, _ in scored]
    if math.isnan(own):
        return 0.0
    if name == "raw":
        return own
    if len(set(values)) < 2:
        return 0.0
    centre = statistics.fmean(values)
    match name:
        case "mean":
            return own - centre
        case "mean_std":
            return (own - centre) / (statistics.stdev(values) + 1e-4)
        case "leave_one_out":
            return own - (sum(values) - own) / (len(values) - 1)
        case "batch_std":
            return (own - centre) / (batch_deviation + 1e-4)
        case "length_weighted":
            total = sum(length for _, length in scored)
            baseline = sum(s * length for s, length in scored) / total if total else centre
            return own - baseline
        case "max_rl":
            return (own - centre) / centre


def advantages(name, groups):
    scores = [np.array([s for s, _ in members], np.float64) for members in groups]
    lengths = [np.array([length for _, length in members], np.int64) for members in groups]
    return [found.tolist() for found in ADVANTAGES[name](scores, lengths)]


@pytest.mark.parametrize("name", ADVANTAGES)
@given(groups=st.lists(group, max_size=4))
def test_advantages_equal_the_formula_with_unscored_rollouts_outside(name, groups):
    # F067: NaN is outside mean and spread, and gets 0.
    for found, expected in zip(advantages(name, groups), slow(name, groups), strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", COMPARING)
@given(value=score, size=st.integers(0, 9), num_holes=st.integers(0, 3), other=group)
def test_a_group_of_equal_scores_gets_exactly_0_whatever_stands_beside_it(
    name, value, size, num_holes, other
):
    # F004: the group is judged, not the batch.
    equal = [(value, 3 + i) for i in range(size)] + [(math.nan, 5)] * num_holes
    found = advantages(name, [equal, other])
    assert found[0] == [0.0] * (size + num_holes)


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("values", [[], [math.nan], [3.0], [math.nan, 3.0, math.nan]])
def test_fewer_than_two_scores_give_0(name, values):
    assert advantages(name, [[(v, 4) for v in values]]) == [[0.0] * len(values)]


@pytest.mark.parametrize("name", ["mean_std", "mean", "leave_one_out", "max_rl", "raw"])
def test_a_group_does_not_depend_on_the_others_unless_its_rule_says_so(name):
    one, two = [(0.0, 3), (1.0, 9)], [(4.0, 2), (0.5, 2), (1.0, 7)]
    assert advantages(name, [one, two])[0] == advantages(name, [one])[0]


def test_the_length_weighted_baseline_makes_the_length_weighted_sum_vanish():
    # sum_i L_i (r_i - b) = 0 defines b: longer completions pull the baseline towards their score.
    [found] = advantages("length_weighted", [[(1.0, 90), (0.0, 10)]])
    assert found == pytest.approx([0.1, -0.9])


def test_an_unscorable_answer_among_failures_is_not_reinforced():
    # [-1, -1, 0.5]: mean -0.5, sample std sqrt((0.25 + 0.25 + 1) / 2) = 0.866025...
    [found] = advantages("mean_std", [[(math.nan, 1), (-1.0, 1), (-1.0, 1), (0.5, 1)]])
    scale = math.sqrt(0.75) + 1e-4
    assert found == pytest.approx([0, -0.5 / scale, -0.5 / scale, 1 / scale])


def test_scores_that_differ_by_rounding_get_small_advantages():
    # Spread 2^-20 / sqrt(2) = 6.7e-7 against the 1e-4 that is added.
    [found] = advantages("mean_std", [[(1.0, 1), (1.0 + 2.0**-20, 1)]])
    assert max(map(abs, found)) < 0.01


def test_a_rare_success_weighs_inversely_to_its_rate():
    # One of four: (1 - 1/4) / (1/4) = 3, and -1 for the failures.
    [found] = advantages("max_rl", [[(1.0, 1), (0.0, 1), (0.0, 1), (0.0, 1)]])
    assert found == pytest.approx([3, -1, -1, -1])


def test_a_negative_score_has_no_rate_to_divide_by():
    with pytest.raises(ValueError, match=r"max_rl.*-0\.5"):
        advantages("max_rl", [[(1.0, 1), (-0.5, 1)]])


def test_the_overlong_penalty_is_a_slope_that_ends_at_minus_one():
    lengths = np.array([0, 60, 80, 90, 100, 140])
    found = overlong_penalty(lengths, max_completion_tokens=100, buffer_tokens=20)
    assert found.tolist() == pytest.approx([0, 0, 0, -0.5, -1, -1])


def test_shaped_scores_are_compared_and_unscored_ones_stay_outside():
    shaped = with_overlong_penalty(ADVANTAGES["mean"], max_completion_tokens=100, buffer_tokens=20)
    [found] = shaped([np.array([1.0, 1.0, math.nan])], [np.array([10, 90, 100])])
    # 1 and 1 - 0.5: the mean is 0.75.
    assert found.tolist() == pytest.approx([0.25, -0.25, 0.0])
