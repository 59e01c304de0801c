"""Adaptive staleness: when the bound moves, when it does not, and what it says at the end of its rope."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learner.controller import StalenessController


def run(controller, *measurements):
    """(divergence, ess) each; returns the bound after each step."""
    return [controller.observe(divergence=d, ess=e).bound for d, e in measurements]


BAD, POOR, CALM, BETWEEN = (0.25, 0.9), (0.01, 0.2), (0.04, 0.9), (0.1, 0.9)


def test_three_diverging_steps_lower_the_bound_by_one_and_two_do_not():
    assert run(StalenessController(4), BAD, BAD, BAD) == [4, 4, 3]
    assert run(StalenessController(4), BAD, BAD, BETWEEN, BAD, BAD, BETWEEN) == [4] * 6


def test_too_small_an_effective_sample_lowers_the_bound_as_well():
    assert run(StalenessController(4), POOR, BAD, POOR) == [4, 4, 3]


def test_after_a_change_the_groups_of_the_old_bound_are_waited_out():
    # 4 steps under the promise of 4, then 3 diverging ones count.
    assert run(StalenessController(4), *[BAD] * 10) == [4, 4, 3, 3, 3, 3, 3, 3, 3, 2]


def test_relief_is_no_reason_to_raise_the_bound():
    # Between 0.05 and 0.20 nothing moves, however long: that is the hysteresis.
    controller = StalenessController(4)
    run(controller, BAD, BAD, BAD)
    assert set(run(controller, *[BETWEEN] * 200)) == {3}


def test_twenty_calm_steps_raise_the_bound_again_but_not_above_the_configured_one():
    controller = StalenessController(2)
    run(controller, BAD, BAD, BAD)
    # 2 settling steps, 19 calm ones, then the 20th.
    assert run(controller, *[CALM] * 22) == [1] * 21 + [2]
    assert set(run(controller, *[CALM] * 100)) == {2}


def test_one_step_that_is_not_calm_starts_the_count_again():
    controller = StalenessController(2)
    run(controller, BAD, BAD, BAD, CALM, CALM)
    assert run(controller, *[CALM] * 19, BETWEEN, *[CALM] * 20) == [1] * 39 + [2]


def test_the_lowest_bound_that_still_diverges_is_an_engine_mismatch():
    for lowest in (0, 1):
        controller = StalenessController(lowest)
        said = [controller.observe(divergence=0.3, ess=0.9).engine_mismatch for _ in range(4)]
        assert said == [False, False, True, True]
        assert controller.bound == lowest
        assert not controller.observe(divergence=0.1, ess=0.9).engine_mismatch


def test_a_step_without_a_measurement_counts_as_none():
    nothing = (None, None)
    assert run(StalenessController(3), BAD, nothing, BAD, nothing, BAD) == [3, 3, 3, 3, 2]


def test_a_measurement_that_is_no_number_is_divergence():
    controller = StalenessController(3)
    assert run(controller, (math.nan, 0.9), (math.inf, 0.9), (0.0, math.nan)) == [3, 3, 2]


@settings(max_examples=300)
@given(
    highest=st.integers(0, 5),
    steps=st.lists(
        st.tuples(st.sampled_from([0.0, 0.04, 0.1, 0.3]), st.sampled_from([0.1, 0.9])), max_size=80
    ),
)
def test_the_bound_moves_by_one_within_its_range_and_never_both_ways_at_once(highest, steps):
    controller = StalenessController(highest)
    bound, last_change = highest, 0
    for index, (divergence, ess) in enumerate(steps):
        decision = controller.observe(divergence=divergence, ess=ess)
        assert decision.bound == bound + decision.change
        assert min(1, highest) <= decision.bound <= highest
        if decision.change:
            bad = [d > 0.2 or e < 0.3 for d, e in steps[: index + 1]]
            needed = 3 if decision.change < 0 else 20
            assert index + 1 - last_change >= needed
            recent = bad[index + 1 - needed :]
            assert all(recent) if decision.change < 0 else not any(recent)
            last_change = index + 1
        bound = decision.bound
