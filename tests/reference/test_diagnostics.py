"""Mismatch metrics against the scalar restatement, their independence of cuts, and their precision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.diagnostics import BIN_VALUES, NUM_BINS, Tables, describe, quantile, tabulate
from asyncrl.algo.tokens import TokenBatch
from tests.reference import scalar_diagnostics as slow
from tests.reference.scalar_diagnostics import Measured

K = 3
QUANTILES = ("ratio_p", "abs_p", "weight_p")

y_value = st.one_of(st.floats(-3, 3), st.floats(-60, 60), st.floats(-0.01, 0.01), st.just(0.0))
token = st.builds(
    Measured,
    y=st.one_of(y_value, st.none()),
    staleness=st.integers(0, K),
    weight=st.one_of(st.just(0.0), st.floats(0.01, 5.0)),
    trained=st.integers(0, 5).map(bool),
)
completions = st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=5)


def batch_of(completions):
    tokens = [t for c in completions for t in c]
    garbage = [math.nan, math.inf, -math.inf]

    def number(index, t):
        return garbage[index % 3] if t.y is None or not t.trained else -1.0 - t.y

    proximal = [-1.0 if t.trained else math.nan for t in tokens]
    column = torch.tensor(proximal, dtype=torch.float64)
    batch = TokenBatch(
        logprobs=column.clone().requires_grad_(),
        proximal_logprobs=column,
        behaviour_logprobs=torch.tensor(
            [number(i, t) for i, t in enumerate(tokens)], dtype=torch.float64
        ),
        advantages=torch.ones_like(column),
        completion_mask=torch.tensor([t.trained for t in tokens], dtype=torch.bool),
        staleness=torch.tensor([t.staleness for t in tokens], dtype=torch.int32),
        sequence=torch.tensor([i for i, c in enumerate(completions) for _ in c], dtype=torch.int64),
        behaviour_weights=torch.full_like(column, math.nan),
        scale=torch.ones_like(column),
    )
    weights = [t.weight if t.trained and t.y is not None else 0.0 for t in tokens]
    return batch, torch.tensor(weights, dtype=torch.float64)


def measure(*parts, max_staleness=K):
    """Metrics of micro-batches whose tables are added up."""
    tables = [tabulate(*batch_of(part), max_staleness=max_staleness)[0] for part in parts]
    added = Tables(*(sum(columns) for columns in zip(*tables, strict=True)))
    return describe(*(table.numpy() for table in added))


def in_its_bin(y):
    """Half a bin is asinh(20 / 1e-3) / 256 / 2 = 0.0207 wide in units of d y / sqrt(y^2 + 1e-6)."""
    return pytest.approx(y, abs=0.0212 * math.hypot(y, 1e-3))


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not any(q in name for q in QUANTILES):
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name
        elif "abs" in name:
            assert found[name] == in_its_bin(value), name
        else:  # a quantile of rho: its logarithm is in the histogram
            assert math.log(found[name]) == in_its_bin(math.log(value)), name


@settings(max_examples=300)
@given(completions=completions)
def test_every_bucket_and_the_whole_equal_the_scalar_restatement(completions):
    found = measure(completions)
    expected = slow.metrics(completions)
    for d in range(K + 1):
        of_bucket = slow.metrics(completions, d)
        expected |= {f"{name}@{d}": value for name, value in of_bucket.items()}
    for name in ("correction/weight_p1", "correction/weight_p50", "correction/weight_p99"):
        found.pop(name, None)
    drift = found.pop("drift/k3", None)
    # Of completions that saw no other version, untrained tokens left aside.
    whole = [c for c in completions if not any(t.trained and t.staleness > 0 for t in c)]
    if pure := slow.metrics(whole, 0):
        expected["mismatch/k3_numerics"] = pure["mismatch/k3"]
    assert_equal(found, expected)
    at_zero, stale = slow.metrics(completions, 0), []
    for c in completions:
        stale.append([t for t in c if t.staleness > 0])
    of_stale = slow.metrics(stale)
    if at_zero and of_stale:
        wanted = of_stale["mismatch/k3"] - at_zero["mismatch/k3"]
        assert drift == pytest.approx(wanted, rel=1e-9, abs=1e-9 * of_stale["mismatch/exp_abs"])
    else:
        assert drift is None


@settings(max_examples=100)
@given(completions=completions, data=st.data())
def test_metrics_do_not_depend_on_the_cut_into_micro_batches(completions, data):
    # F001: also the quantiles, which are no means of quantiles.
    cut = data.draw(st.integers(0, len(completions)))
    parts = [part for part in (completions[:cut], completions[cut:]) if part]
    assert measure(*parts) == pytest.approx(measure(completions), rel=1e-9, abs=1e-12)


def test_quantiles_of_the_final_weights_show_truncation_and_rejection():
    tokens = [Measured(0.0, 0, w) for w in [0.0] * 3 + [0.5] * 40 + [1.0] * 40 + [2.0] * 17]
    found = measure([tokens])
    assert found["correction/weight_p1"] == pytest.approx(0.0, abs=1e-8)
    assert found["correction/weight_p50"] == pytest.approx(1.0, rel=1e-6)
    assert found["correction/weight_p99"] == pytest.approx(2.0, rel=0.02)


@given(values=st.lists(st.floats(-20, 20), min_size=1, max_size=50), share=st.floats(0.001, 1.0))
def test_a_histogram_quantile_is_the_empirical_one_up_to_its_bin(values, share):
    completions = [[Measured(value, 0, 1.0) for value in values]]
    tables, _ = tabulate(*batch_of(completions), max_staleness=0)
    found = quantile(tables.ratios[0].numpy(), share)
    ordered = sorted(values)
    # share * n may fall on either side of a whole number.
    ranks = {math.ceil(share * len(values) + e) - 1 for e in (-1e-9, 1e-9)}
    near = [ordered[min(max(rank, 0), len(values) - 1)] for rank in ranks]
    assert any(found == in_its_bin(value) for value in near)


def test_bins_are_symmetric_around_exactly_zero():
    assert len(BIN_VALUES) == NUM_BINS
    assert BIN_VALUES[NUM_BINS // 2] == 0.0
    np.testing.assert_allclose(BIN_VALUES, -BIN_VALUES[::-1])
    assert BIN_VALUES[-1] == pytest.approx(20.0)


def test_the_largest_mismatch_is_of_trained_finite_tokens():
    tokens = [
        Measured(0.1, 0, 1.0),
        Measured(-3.0, 0, 1.0),
        Measured(9.0, 0, 1.0, False),
        Measured(None, 0, 1.0),
    ]
    tables, largest = tabulate(*batch_of([tokens]), max_staleness=0)
    assert largest.item() == pytest.approx(3.0)
    assert tables.tokens[0, 0].item() == 2


@pytest.mark.parametrize("tokens", [[], [Measured(5.0, 0, 1.0, False)], [Measured(None, 0, 1.0)]])
def test_without_tokens_there_are_no_metrics(tokens):
    assert measure([tokens]) == {}
    assert tabulate(*batch_of([tokens]), max_staleness=K)[1].item() == 0.0


def test_tiny_mismatch_keeps_its_digits_in_float32():
    # k3 of 0.01 is 5.0167e-5; e^y - 1 - y written plainly loses it to rounding in float32.
    batch, weights = batch_of([[Measured(0.0, 0, 1.0)]])
    batch = batch._replace(
        proximal_logprobs=torch.tensor([0.01], dtype=torch.float32),
        behaviour_logprobs=torch.tensor([0.0], dtype=torch.float32),
    )
    tables, _ = tabulate(batch, weights.float(), max_staleness=0)
    found = describe(*(table.numpy() for table in tables))
    assert found["mismatch/k3@0"] == pytest.approx(5.0167e-5, rel=1e-4)


def test_numerics_are_measured_only_where_no_older_version_was_seen():
    pure = [Measured(0.1, 0, 1.0)]
    crossed = [Measured(0.0, 1, 1.0), Measured(0.5, 0, 1.0)]
    k3 = [math.exp(y) - 1 - y for y in (0.1, 0.5)]
    found = measure([pure, crossed])
    assert found["mismatch/k3@0"] == pytest.approx(sum(k3) / 2)
    assert found["mismatch/k3_numerics"] == pytest.approx(k3[0])
    assert "mismatch/k3_numerics" not in measure([crossed])


def test_at_staleness_0_alone_the_drift_is_unknown_and_else_it_is_the_difference():
    fresh = [Measured(0.1, 0, 1.0)]
    old = [Measured(0.3, 2, 1.0)]
    k3 = [math.exp(y) - 1 - y for y in (0.1, 0.3)]
    assert "drift/k3" not in measure([fresh])
    assert "drift/k3" not in measure([old])
    assert measure([fresh, old])["drift/k3"] == pytest.approx(k3[1] - k3[0])
