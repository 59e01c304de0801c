"""Scales by hand: three completions of 1, 4 and 5 trained tokens, the last two of one prompt."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo import AGGREGATIONS

LENGTHS, PROMPTS = np.array([1, 4, 5]), np.array([0, 2, 2])


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        # N = 10, B = 3, P = 2 (prompt 1 trained nothing), L = 5.
        ("token_mean", [1, 1, 1]),
        ("sequence_mean", [10 / 3, 10 / 12, 10 / 15]),
        ("constant_length", [10 / 15, 10 / 15, 10 / 15]),
        ("prompt_mean", [10 / 2, 10 / 18, 10 / 18]),
    ],
)
def test_scales_are_those_of_the_definitions(name, scales):
    assert AGGREGATIONS[name](LENGTHS, PROMPTS, constant=5).tolist() == pytest.approx(scales)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 3)), min_size=1, max_size=9))
def test_means_of_a_constant_are_the_constant(completions):
    # But for the constant length: there the mean is that of lengths over L.
    lengths, prompts = map(np.array, zip(*completions, strict=True))
    for name, aggregation in AGGREGATIONS.items():
        mean = (aggregation(lengths, prompts, constant=50) * lengths).sum() / lengths.sum()
        expected = lengths.mean() / 50 if name == "constant_length" else 1.0
        assert mean == pytest.approx(expected)
