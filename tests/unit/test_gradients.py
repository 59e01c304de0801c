"""Consecutive gradients: their cosine over a bounded, fixed sample."""

import math

import pytest
import torch

from asyncrl.learner import gradients
from asyncrl.learner.gradients import GradientSketch
from asyncrl.learner.ranks import Ranks


def parameters_with(*columns):
    found = [torch.zeros(len(c), requires_grad=True) for c in columns]
    set_gradients(found, *columns)
    return found


def set_gradients(parameters, *columns):
    for parameter, column in zip(parameters, columns, strict=True):
        parameter.grad = None if column is None else torch.tensor(column)


def test_the_cosine_is_over_all_parameters_and_misses_the_first_step():
    parameters = parameters_with([3.0, 0.0], [4.0])
    sketch = GradientSketch(parameters)
    assert sketch.cosine(Ranks()) is None
    set_gradients(parameters, [0.0, 5.0], [12.0])
    # (4 * 12) / (5 * 13)
    assert sketch.cosine(Ranks()) == pytest.approx(48 / 65)
    set_gradients(parameters, [0.0, -5.0], [-12.0])
    assert sketch.cosine(Ranks()) == pytest.approx(-1)


def test_scaling_a_gradient_changes_nothing():
    parameters = parameters_with([1.0, 2.0])
    sketch = GradientSketch(parameters)
    sketch.cosine(Ranks())
    set_gradients(parameters, [1e-3, 2e-3])
    assert sketch.cosine(Ranks()) == pytest.approx(1)


def test_the_last_gradient_is_remembered_as_it_was():
    parameters = parameters_with([1.0, 0.0])
    sketch = GradientSketch(parameters)
    sketch.cosine(Ranks())
    parameters[0].grad.mul_(0).add_(torch.tensor([0.0, 1.0]))  # in place, as clipping does
    assert sketch.cosine(Ranks()) == pytest.approx(0)


def test_a_gradient_of_zero_has_no_direction():
    parameters = parameters_with([0.0, 0.0])
    sketch = GradientSketch(parameters)
    sketch.cosine(Ranks())
    assert sketch.cosine(Ranks()) is None


def test_a_parameter_without_a_gradient_counts_as_zero():
    parameters = parameters_with([3.0], [4.0])
    sketch = GradientSketch(parameters)
    sketch.cosine(Ranks())
    set_gradients(parameters, [1.0], None)
    assert sketch.cosine(Ranks()) == pytest.approx(3 / 5)


def test_a_large_model_is_sampled_evenly_across_its_parameters(monkeypatch):
    monkeypatch.setattr(gradients, "MAX_ELEMENTS", 10)
    sizes = [7, 1, 50, 12]  # 70 elements, every 7th: 0, 7, 14, ..., 63
    flat = torch.arange(70.0)
    parameters = parameters_with(*[c.tolist() for c in flat.split(sizes)])
    sketch = GradientSketch(parameters)
    sketch.cosine(Ranks())
    changed = flat.clone()
    changed[torch.arange(70) % 7 != 0] = math.pi  # nobody looks there
    set_gradients(parameters, *[c.tolist() for c in changed.split(sizes)])
    assert sketch.cosine(Ranks()) == pytest.approx(1)
    changed[63] = -63.0
    set_gradients(parameters, *[c.tolist() for c in changed.split(sizes)])
    assert sketch.cosine(Ranks()) < 0.9


@pytest.mark.parametrize(("start", "prime"), [(1, 1), (2, 2), (4, 5), (90, 97)])
def test_strides_are_prime_so_that_no_column_is_sampled_alone(start, prime):
    assert gradients._next_prime(start) == prime
