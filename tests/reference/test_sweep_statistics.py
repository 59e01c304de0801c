"""The verdict of a sweep against slow restatements, and on simulated data with known effects."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.sweep.intervals import percentile_interval, student_cdf, student_quantile, t_interval
from asyncrl.sweep.verdict import Verdict, judge
from tests.reference.sweep_statistics import (
    T_975,
    all_resampled_means,
    claimed,
    student_probability,
)

KS = (0, 1, 2, 4, 8, 16)


def row(k: int, seed: int, score: float, **more: object) -> dict:
    found = {"variant": "v", "k": k, "seed": seed, "outcome": "done", "cause": ""}
    found["staleness"] = {"mean": float(k), "max": k}
    return found | {"final": score, "area_samples": score} | more


def verdict_of(scores: np.ndarray, ks: tuple[int, ...] = KS) -> Verdict:
    """Of the endpoint `final`; scores are [seeds, ks]."""
    cells = [(k, s) for s in range(len(scores)) for k in ks]
    rows = [row(k, s, float(scores[s, ks.index(k)])) for k, s in cells]
    return judge(rows, [("v", k, s) for k, s in cells])[0]


def statuses(verdict: Verdict) -> dict[int, str]:
    return {c.k: c.status for c in verdict.comparisons}


@given(t=st.floats(0, 30), freedom=st.integers(1, 12))
def test_students_distribution_is_the_integral_of_its_density(t: float, freedom: int) -> None:
    assert student_cdf(t, freedom) == pytest.approx(student_probability(t, freedom), abs=1e-5)


@pytest.mark.parametrize("freedom", list(T_975))
def test_students_quantiles_are_those_of_the_table(freedom: int) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(T_975[freedom], abs=6e-4)


def test_an_interval_by_hand() -> None:
    # mean 2, s = 1, n = 3: 4.303 / sqrt(3) = 2.484.
    found = t_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.num) == (2.0, 3)
    assert found.half_width == pytest.approx(2.484, abs=1e-3)
    with pytest.raises(ValueError, match="2 values or more, got 1"):
        t_interval([1.0])


def test_a_percentile_interval_is_that_of_all_resamples() -> None:
    values = [0.0, 0.1, 0.4, 1.0, 0.2]
    means = all_resampled_means(values)  # 3125, each as likely
    low, high = percentile_interval(values, np.random.default_rng(0))
    # Between the means of neighbouring ranks: 10 000 draws fix a 2.5 % point to +- 0.5 %.
    assert means[int(0.020 * 3125)] <= low <= means[int(0.030 * 3125)]
    assert means[int(0.970 * 3125)] <= high <= means[int(0.980 * 3125)]
    assert percentile_interval([0.5], np.random.default_rng(0)) == (0.5, 0.5)
    with pytest.raises(ValueError, match="at least one"):
        percentile_interval([], np.random.default_rng(0))


@given(
    seeds=st.integers(3, 8),
    effects=st.lists(st.sampled_from([0.0, -3.0, -30.0, 10.0]), min_size=5, max_size=5),
    entropy=st.integers(0, 10**6),
)
def test_the_verdict_is_the_closed_form_of_its_rule(
    seeds: int, effects: list[float], entropy: int
) -> None:
    rng = np.random.default_rng(entropy)
    scores = rng.normal(size=(seeds, 6)) + np.array([0.0, *effects])
    table = {(k, s): float(scores[s, i]) for i, k in enumerate(KS) for s in range(seeds)}
    assert statuses(verdict_of(scores)) == claimed(table, KS, seeds)


def share_with_a_claim(
    rng: np.random.Generator, *, seeds: int, effects: tuple[float, ...], among: tuple[int, ...],
    draw: str = "normal", num: int = 1000,
) -> float:  # fmt: skip
    """Share of simulated sweeps in which some k of `among` is claimed to differ."""
    hits = 0
    for _ in range(num):
        noise = getattr(rng, draw)(size=(seeds, len(KS)))
        found = statuses(verdict_of(noise + np.array(effects)))
        hits += any(found[k] in ("worse", "better") for k in among)
    return hits / num


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("draw", ["normal", "uniform", "exponential"])
def test_without_an_effect_one_sweep_in_twenty_claims_one(seeds: int, draw: str) -> None:
    """5 % +- 3 standard errors of 1000 sweeps is 7.1 %; exact for normal scores."""
    rng = np.random.default_rng(seeds)
    share = share_with_a_claim(rng, seeds=seeds, effects=(0.0,) * 6, among=KS[1:], draw=draw)
    assert share <= 0.071
    if draw == "normal":
        assert share >= 0.029


def test_ks_that_do_differ_do_not_raise_the_false_alarms_about_the_others() -> None:
    rng = np.random.default_rng(2)
    effects = (0.0, 0.0, 0.0, 0.0, -50.0, -50.0)
    share = share_with_a_claim(rng, seeds=5, effects=effects, among=(1, 2, 4))
    assert 0.029 <= share <= 0.071


def test_five_seeds_find_an_effect_of_three_standard_deviations() -> None:
    rng = np.random.default_rng(3)
    effects = (0.0, 0.0, 0.0, 0.0, 0.0, -3.0)
    # Noncentral t: 4 degrees of freedom, shift 3 / sqrt(2) * sqrt(5) = 4.74: power 0.93.
    assert share_with_a_claim(rng, seeds=5, effects=effects, among=(16,), num=500) >= 0.88
    assert (
        share_with_a_claim(rng, seeds=5, effects=(0.0,) * 5 + (-1.0,), among=(16,), num=500) < 0.4
    )
