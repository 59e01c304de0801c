"""Recorded copies: what a loader did once is done again, and nothing that it did not do."""

import pytest
import torch
from torch import nn

from asyncrl.generator.copy_plan import record_copies


class Fused(nn.Module):
    """Loads as vLLM's models do: q and k into one matrix, a bias as it is, the rest by slices."""

    def __init__(self, *, scale: float | None = None) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
        self.halves = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self._scale = scale

    def load_weights(self, weights):
        for name, values in weights:
            if name in ("q", "k"):
                self.qk.data.narrow(0, 0 if name == "q" else 3, 3).copy_(values)
            elif name == "bias":
                self.bias.data.copy_(values if self._scale is None else values * self._scale)
            else:  # transposed, and one column in two
                self.halves.data.copy_(values.t()[:, ::2])


def offer(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (3, 4), "k": (3, 4), "bias": (3,), "rest": (8, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def recorded(model, tensors):
    return record_copies(tensors, lambda: model.load_weights(tensors.items()))


def test_a_plan_does_with_new_values_what_the_loader_would_do():
    model, other = Fused(), Fused()
    plan = recorded(model, offer(0))
    plan.carry_out(offer(1))
    other.load_weights(offer(1).items())
    for name, values in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], values), name


def test_recording_loads():
    model, other = Fused(), Fused()
    recorded(model, offer(0))
    other.load_weights(offer(0).items())
    assert torch.equal(model.qk, other.qk)
    assert torch.equal(model.halves, other.halves)


def test_one_tensor_at_a_time_gives_the_same():
    model, other = Fused(), Fused()
    plan, same = recorded(model, offer(0)), recorded(other, offer(0))
    plan.carry_out(offer(1))
    for name, values in offer(1).items():
        same.carry_out_one(name, values)
    for name, values in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], values), name


def test_a_loader_that_computes_has_no_plan():
    with pytest.raises(ValueError, match="came from no offered tensor"):
        recorded(Fused(scale=2.0), offer(0))


def test_tensors_that_lie_otherwise_than_the_recorded_ones_are_refused():
    model = Fused()
    plan = recorded(model, offer(0))
    before = model.qk.clone()
    for spoil in (
        lambda t: t | {"q": torch.randn(4, 3).t()},  # other strides
        lambda t: t | {"q": t["q"].double()},
        lambda t: {name: values for name, values in t.items() if name != "k"},
    ):
        with pytest.raises(ValueError, match="is missing or has another layout"):
            plan.carry_out(spoil(offer(1)))
    assert torch.equal(model.qk, before)


def test_tensors_that_share_one_buffer_are_told_apart():
    whole = torch.arange(24.0)
    tensors = {"q": whole[:12].view(3, 4), "k": whole[12:].view(3, 4)} | {
        name: values for name, values in offer(0).items() if name in ("bias", "rest")
    }
    model = Fused()
    plan = recorded(model, tensors)
    plan.carry_out(offer(1))
    assert torch.equal(model.qk, torch.cat([offer(1)["q"], offer(1)["k"]]))
