"""Sampling: the token follows the stated distribution and the log-prob is of that distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.generator.sampling import BLOCK, CompletionStream, nonfinite_rows, sample
from tests.reference.sampling import drawn_token, sampled_distribution

LARGEST_UNIFORM = 1.0 - 2.0**-53


def draw(logits, uniforms, temperature=1.0, top_p=1.0, top_k=0):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    rows = logits.shape[0]
    tokens, logprobs = sample(
        logits,
        np.broadcast_to(np.asarray(uniforms, np.float64), (rows,)).copy(),
        temperature=np.broadcast_to(np.asarray(temperature, np.float64), (rows,)).copy(),
        top_p=np.broadcast_to(np.asarray(top_p, np.float64), (rows,)).copy(),
        top_k=np.broadcast_to(np.asarray(top_k, np.int64), (rows,)).copy(),
    )
    return tokens.tolist(), logprobs.tolist()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.sampled_from([1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]),
    rows=st.integers(1, 4),
    scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]),
)
def test_every_row_equals_the_scalar_reference_under_its_own_settings(
    seed, vocabulary, rows, scale
):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, vocabulary)) * scale).astype(np.float32)
    temperature = rng.uniform(0.3, 2.0, rows)
    top_p = np.where(rng.random(rows) < 0.5, 1.0, rng.uniform(0.05, 0.99, rows))
    top_k = np.where(rng.random(rows) < 0.5, 0, rng.integers(1, vocabulary + 2, rows))
    uniforms = rng.random(rows)
    tokens, logprobs = draw(logits, uniforms, temperature, top_p, top_k)
    for i in range(rows):
        distribution = sampled_distribution(logits[i], temperature[i], top_p[i], int(top_k[i]))
        assert tokens[i] in distribution
        assert logprobs[i] == pytest.approx(math.log(distribution[tokens[i]]), abs=2e-5)
        # At a boundary of the CDF float32 may give the neighbour: compare away from boundaries.
        edges = np.cumsum([distribution[t] for t in sorted(distribution)])
        if np.abs(edges - uniforms[i]).min() > 1e-5:
            assert tokens[i] == drawn_token(distribution, uniforms[i])


def test_a_grid_of_uniforms_gives_every_token_its_share():
    # 4 tokens with weights 1:2:4:1 and 8000 equally spaced uniforms: 1000, 2000, 4000, 1000 draws.
    logits = np.log(np.array([[1.0, 2.0, 4.0, 1.0]])).repeat(8000, axis=0)
    tokens, _ = draw(logits, (np.arange(8000) + 0.5) / 8000)
    assert np.bincount(tokens).tolist() == [1000, 2000, 4000, 1000]


@pytest.mark.parametrize("before", [0, 2 * BLOCK])
@pytest.mark.parametrize("after", [0, 3 * BLOCK])
@pytest.mark.parametrize("impossible", [-math.inf, -200.0])
def test_a_token_of_probability_zero_is_never_drawn_at_the_edges(before, after, impossible):
    support = [impossible, 0.0, impossible, 0.0, impossible]
    logits = [[impossible] * before + support + [impossible] * after]
    assert draw(logits, 0.0)[0] == [before + 1]
    assert draw(logits, LARGEST_UNIFORM)[0] == [before + 3]


def test_the_largest_uniform_stays_inside_the_cut_set():
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0)) * 4
    for options in ({"top_k": 3}, {"top_p": 0.5}, {"top_p": 0.5, "top_k": 7}):
        tokens, logprobs = draw(logits, LARGEST_UNIFORM, **options)
        for i, token in enumerate(tokens):
            kept = sampled_distribution(
                logits[i].tolist(), 1.0, options.get("top_p", 1.0), options.get("top_k", 0)
            )
            assert token == max(kept)
            assert logprobs[i] == pytest.approx(math.log(kept[token]), abs=1e-5)


def test_top_k_1_is_greedy_with_log_prob_zero():
    tokens, logprobs = draw([[1.0, 3.0, 2.0], [5.0, -1.0, 0.0]], [0.999, 0.0], top_k=1)
    assert tokens == [1, 0]
    assert logprobs == [0.0, 0.0]


def test_tokens_that_tie_with_the_last_kept_one_are_kept():
    # top_k = 2 of weights 2, 1, 1, 0.5: both ones stay, so the shares are 1/2, 1/4, 1/4.
    logits = np.log(np.array([[2.0, 1.0, 1.0, 0.5]]))
    assert [draw(logits, u, top_k=2)[0][0] for u in (0.49, 0.74, 0.99)] == [0, 1, 2]
    assert draw(logits, 0.99, top_k=2)[1][0] == pytest.approx(math.log(0.25), abs=1e-6)


def test_top_p_keeps_the_token_that_reaches_the_share_and_no_other():
    # Shares 0.5, 0.3, 0.2: p = 0.6 needs two tokens (0.8), so they get 0.625 and 0.375.
    logits = np.log(np.array([[0.2, 0.5, 0.3]]))
    tokens, logprobs = draw(logits.repeat(2, axis=0), [0.62, 0.63], top_p=0.6)
    assert tokens == [1, 2]
    assert logprobs == pytest.approx([math.log(0.625), math.log(0.375)], abs=1e-6)


def test_temperature_scales_the_log_prob_too():
    # F013.
    # Logits 0 and ln 2 at T = 0.5 have weights 1 : 4.
    tokens, logprobs = draw([[0.0, math.log(2.0)]] * 2, [0.19, 0.21], temperature=0.5)
    assert tokens == [0, 1]
    assert logprobs == pytest.approx([math.log(0.2), math.log(0.8)], abs=1e-6)


def test_a_very_low_temperature_does_not_overflow():
    assert draw([[30.0, 31.0]], 0.5, temperature=1e-6) == ([1], [0.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_distribution_is_named(bad):
    logits = torch.zeros(3, 300)
    logits[1, 299] = bad
    assert nonfinite_rows(logits) == [1]
    with pytest.raises(ValueError, match="row 1 of 3"):
        draw(logits, 0.5)


def test_a_row_of_only_minus_infinity_is_named_but_single_ones_are_probability_zero():
    logits = torch.full((2, 3), -math.inf)
    logits[0, 2] = 0.0
    assert nonfinite_rows(logits) == [1]
    with pytest.raises(ValueError, match="row 1 of 2"):
        draw(logits, 0.5)
    assert draw(logits[:1], LARGEST_UNIFORM) == ([2], [0.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uniforms": 1.0}, "uniform of row 0"),
        ({"uniforms": -0.1}, "uniform of row 0"),
        ({"temperature": [1.0, 0.0]}, "temperature of row 1"),
        ({"top_p": [0.0, 1.0]}, "top_p of row 0"),
        ({"top_p": 1.1}, "top_p of row 0"),
        ({"top_k": -1}, "top_k of row 0"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_row(options, message):
    with pytest.raises(ValueError, match=message):
        draw([[0.0, 1.0], [0.0, 1.0]], **{"uniforms": 0.5} | options)


def test_logits_are_not_changed_and_must_be_float32():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    draw(logits, 0.3, temperature=0.7, top_p=0.5, top_k=3)
    assert torch.equal(logits, before)
    one = np.ones(2)
    with pytest.raises(ValueError, match="float32"):
        sample(logits.bfloat16(), one / 2, temperature=one, top_p=one, top_k=np.zeros(2, np.int64))


def test_streams_depend_on_seed_and_index_and_on_nothing_else():
    def first(seed, index, count=3):
        stream = CompletionStream(seed, index)
        return [stream.next() for _ in range(count)]

    assert first(5, 2) == first(5, 2, 7)[:3]
    heads = [first(seed, index)[0] for seed in (0, 1, 2**63) for index in range(8)]
    assert len(set(heads)) == len(heads)
    # The stream is Philox with the key (seed, index), so it is the same on every machine.
    words = np.random.Philox(key=np.array([5, 2], np.uint64)).random_raw(3)
    assert first(5, 2) == [(int(word) >> 11) * 2.0**-53 for word in words]
