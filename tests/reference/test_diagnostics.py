"""Mismatch metrics against sums written out by hand, and what they must not see."""

import math

import pytest
import torch

from asyncrl.algo.diagnostics import mismatch_means, mismatch_sums
from asyncrl.algo.tokens import TokenBatch


def batch(log_ratios, staleness, mask, nonfinite=()):
    proximal = torch.linspace(-3, -1, len(log_ratios), dtype=torch.float64)
    behaviour = proximal - torch.tensor(log_ratios, dtype=torch.float64)
    for index in nonfinite:
        behaviour[index] = math.nan
    return TokenBatch(
        logprobs=proximal.clone(),
        proximal_logprobs=proximal,
        behaviour_logprobs=behaviour,
        advantages=torch.ones(len(log_ratios), dtype=torch.float64),
        completion_mask=torch.tensor(mask),
        staleness=torch.tensor(staleness, dtype=torch.int32),
        sequence=torch.zeros(len(log_ratios), dtype=torch.int64),
        behaviour_weights=torch.ones(len(log_ratios), dtype=torch.float64),
        scale=torch.ones(len(log_ratios), dtype=torch.float64),
    )


def measure(*batches, max_staleness=2):
    totals = {}
    for part in batches:
        sums, _ = mismatch_sums(part, max_staleness=max_staleness)
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value.item()
    return mismatch_means(totals)


def test_each_bucket_holds_the_mean_over_its_own_tokens():
    y = [0.1, -0.2, 0.3, 0.5]
    means = measure(batch(y, [0, 0, 2, 1], [True, True, True, False]))
    assert means["mismatch/tokens@0"] == 2
    assert means["mismatch/k1@0"] == pytest.approx((-0.1 + 0.2) / 2)
    assert means["mismatch/abs@0"] == pytest.approx((0.1 + 0.2) / 2)
    k3 = [math.exp(v) - 1 - v for v in y]
    assert means["mismatch/k3@0"] == pytest.approx((k3[0] + k3[1]) / 2)
    assert means["mismatch/exp_abs@0"] == pytest.approx((math.exp(0.1) + math.exp(0.2)) / 2)
    w = [math.exp(v) for v in y]
    assert means["mismatch/ess@0"] == pytest.approx(
        (w[0] + w[1]) ** 2 / (2 * (w[0] ** 2 + w[1] ** 2))
    )
    assert means["mismatch/k3@2"] == pytest.approx(k3[2])
    assert means["mismatch/k3"] == pytest.approx((k3[0] + k3[1] + k3[2]) / 3)
    assert not [name for name in means if name.endswith("@1")]


def test_micro_batches_and_the_whole_agree():
    y, staleness, mask = [0.4, -1.0, 2.0, 0.0], [0, 1, 1, 2], [True] * 4
    parts = [batch(y[:1], staleness[:1], mask[:1]), batch(y[1:], staleness[1:], mask[1:])]
    whole = measure(batch(y, staleness, mask))
    assert measure(*parts) == pytest.approx(whole)


def test_the_largest_mismatch_is_of_trained_finite_tokens():
    part = batch([0.1, -3.0, 9.0, 5.0], [0] * 4, [True, True, False, True], nonfinite=[3])
    sums, largest = mismatch_sums(part, max_staleness=0)
    assert largest.item() == pytest.approx(3.0)
    assert sums["mismatch/tokens@0"].item() == 2


def test_without_tokens_there_are_no_metrics():
    assert measure(batch([5.0], [0], [False])) == {}


def test_tiny_mismatch_keeps_its_digits_in_float32():
    # k3 of 0.01 is 5.0167e-5; e^y - 1 - y written plainly loses it to rounding in float32.
    part = batch([0.01], [0], [True])
    part = part._replace(
        proximal_logprobs=torch.tensor([0.01], dtype=torch.float32),
        behaviour_logprobs=torch.tensor([0.0], dtype=torch.float32),
    )
    sums, _ = mismatch_sums(part, max_staleness=0)
    assert sums["mismatch/k3@0"].item() == pytest.approx(5.0167e-5, rel=1e-4)
