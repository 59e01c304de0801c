"""Alerts: when they begin and end, what they say, and that every metric they name exists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry.alerts import ALERTS, Alert, Trends, Watch, about_staleness
from asyncrl.telemetry.metrics import METRICS

HIGH = Alert("high", "mismatch/k3", "above", 0.1, 3, "do something")
LOW = Alert("low", "mismatch/ess", "below", 0.5, 1, "do something else")


def names(watch, *steps):
    """Per step: the names of the alerts that are on, and of those that began."""
    found = []
    for step in steps:
        on, began = watch.step(step)
        found.append(("".join(a.name for a in on), "".join(a.name for a in began)))
    return found


def k3(value):
    return {"mismatch/k3": value}


def test_an_alert_begins_once_after_enough_steps_in_a_row_and_ends_with_the_first_good_one():
    steps = [k3(v) for v in (0.2, 0.2, 0.05, 0.2, 0.2, 0.2, 0.2, 0.1, 0.2)]
    assert names(Watch((HIGH,)), *steps) == [
        ("", ""), ("", ""), ("", ""), ("", ""), ("", ""), ("high", "high"), ("high", ""), ("", ""),
        ("", ""),
    ]  # fmt: skip


def test_a_step_without_the_metric_counts_as_none():
    steps = [k3(0.2), {}, k3(0.2), {}, k3(0.2), {}, k3(0.0)]
    assert [on for on, _ in names(Watch((HIGH,)), *steps)] == ["", "", "", "", "high", "high", ""]


def test_below_is_the_other_side():
    watch = Watch((LOW,))
    assert names(watch, {"mismatch/ess": 0.5}, {"mismatch/ess": 0.4}) == [("", ""), ("low", "low")]


def test_an_alert_says_what_how_far_and_what_to_do():
    text = HIGH.describe(0.2345)
    assert all(part in text for part in ("mismatch/k3=0.2345", "above 0.1", "3 steps", "do some"))
    assert "in this step" in LOW.describe(0.1)


def test_every_alert_watches_a_declared_metric_under_a_name_of_its_own():
    assert all(alert.metric.partition("@")[0] in METRICS for alert in ALERTS)
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)


def test_a_healthy_step_alerts_to_nothing_and_a_collapse_to_several():
    # F006, F012: what should warn.
    healthy = {
        "mismatch/k3": 1e-3, "mismatch/k3_numerics": 1e-4, "mismatch/exp_abs": 1.02,
        "mismatch/chi2": 0.03,
        "correction/ess": 0.97, "correction/weight": 1.0, "correction/truncated": 0.001,
        "correction/dropped": 0.0, "mismatch/nonfinite": 0.0, "mismatch/clamped": 0.0,
        "ratio/clipped_high": 0.01, "ratio/clipped_low": 0.01, "policy/entropy_ratio": 0.9,
        "optimizer/grad_norm_ratio": 1.2,
        "optimizer/grad_cosine": 0.02, "groups/frac_teaching": 0.5, "staleness/engine_mismatch": 0.0,
        "rollouts/unscored_frac": 0.02,
    }  # fmt: skip
    assert {alert.metric for alert in ALERTS} <= healthy.keys()
    watch = Watch()
    assert all(watch.step(healthy) == ([], []) for _ in range(30))
    collapse = healthy | {
        "mismatch/k3": 0.4, "mismatch/exp_abs": 1.8, "correction/ess": 0.1,
        "optimizer/grad_norm_ratio": 9.0,
    }  # fmt: skip
    on = [{alert.name for alert in watch.step(collapse)[0]} for _ in range(3)]
    assert on[0] == {"gradient_spike"}
    assert on[2] == on[0] | {"mismatch_critical", "divergence", "effective_sample"}


def test_a_scorer_that_fails_now_and_then_is_not_silent():
    watch = Watch()
    on = [watch.step({"rollouts/unscored_frac": 0.3})[1] for _ in range(3)]
    assert [alert.name for alert in on[2]] == ["unscored"]
    assert "scoring.deadline_s" in on[2][0].describe(0.3)


def test_an_entropy_that_halves_by_chance_in_two_steps_is_no_collapse():
    watch = Watch()
    steps = [{"policy/entropy_ratio": ratio} for ratio in (0.2, 0.3, 0.9, 0.4, 0.4, 0.4)]
    on = [names_on for names_on, _ in names(watch, *steps)]
    assert on == ["", "", "", "", "", "entropy_collapse"]


def test_tokens_clipped_on_the_way_down_alert_like_those_on_the_way_up():
    for side in ("high", "low"):
        steps = [{f"ratio/clipped_{side}": 0.3}] * 3
        began = [new for _, new in names(Watch(), *steps)]
        assert began == ["", "", {"high": "clipped", "low": "clipped_low"}[side]]


@given(values=st.lists(st.sampled_from([0.0, 0.2]), max_size=30))
def test_an_alert_is_on_exactly_if_the_last_steps_were_all_beyond(values):
    watch = Watch((HIGH,))
    for index, value in enumerate(values):
        on, _ = watch.step(k3(value))
        last = values[max(0, index - 2) : index + 1]
        assert bool(on) == (len(last) == 3 and min(last) > 0.1)


def test_a_gradient_is_compared_with_the_median_of_the_steps_before_it():
    trends = Trends()
    for index, norm in enumerate([1.0, 2.0, 3.0] * 3 + [2.0]):
        assert trends.step({"optimizer/grad_norm": norm}) == {}, index
    # The median of the ten is 2, with and without the spike.
    for norm in (12.0, 2.0, 7.0):
        found = trends.step({"optimizer/grad_norm": norm})
        assert found == {"optimizer/grad_norm_ratio": pytest.approx(norm / 2)}


def test_entropy_is_compared_with_five_measured_steps_before():
    trends = Trends()
    found = []
    for entropy in (4.0, 3.0, 2.0, None, 2.0, 2.0, 1.0, 2.4, 2.0):
        values = {} if entropy is None else {"policy/entropy": entropy}
        found.append(trends.step(values).get("policy/entropy_ratio"))
    # 1 / 4, 2.4 / 3, 2 / 2.
    assert found == [None] * 6 + [0.25, pytest.approx(0.8), 1.0]


def test_alerts_that_no_larger_staleness_bound_would_help_are_told_from_the_others():
    assert about_staleness([]) == []
    assert about_staleness(["clipped", "variance", "unknown", "mismatch"]) == [
        "mismatch",
        "variance",
    ]
    assert about_staleness(alert.name for alert in ALERTS) == [
        "engine_mismatch", "mismatch_lowest_bound", "mismatch", "mismatch_critical", "divergence",
        "variance", "effective_sample", "truncated", "gradients_aligned",
    ]  # fmt: skip
