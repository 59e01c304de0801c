"""Names, shapes and the merge formula of adapters, against plain loops."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asyncrl.config import LoraConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.merge import AdapterOffer, MergeBase
from asyncrl.weights.adapter import adapted_modules, adapter_names, linear_modules, merged_weight


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 5, bias=False)
        self.norm = nn.LayerNorm(3)
        self.block = nn.ModuleDict({"up": nn.Linear(2, 4), "group_up": nn.Linear(4, 2)})
        self.head = nn.Linear(3, 7)


def test_every_linear_module_but_the_head_is_adapted_with_factors_of_its_shape():
    model = Model()
    linear = linear_modules(model, model.head)
    assert linear == ("up", "block.up", "block.group_up")
    offer = AdapterOffer(model.state_dict(), linear, LoraConfig(rank=2))
    assert {name: tuple(value.shape) for name, value in offer.zeros().items()} == {
        "base_model.model.up.lora_A.weight": (2, 3),
        "base_model.model.up.lora_B.weight": (5, 2),
        "base_model.model.block.up.lora_A.weight": (2, 2),
        "base_model.model.block.up.lora_B.weight": (4, 2),
        "base_model.model.block.group_up.lora_A.weight": (2, 4),
        "base_model.model.block.group_up.lora_B.weight": (2, 2),
    }


def test_names_are_chosen_by_whole_words_at_their_end():
    linear = ("up", "block.up", "block.group_up")
    for ends, chosen in (
        (("up",), ["up", "block.up"]),
        (("block.up",), ["block.up"]),
        (("group_up", "up"), list(linear)),
    ):
        assert adapted_modules(linear, LoraConfig(rank=1, target_modules=ends)) == chosen
    with pytest.raises(ConfigError, match=r"'roup_up' is no linear module.*it has group_up, up"):
        adapted_modules(linear, LoraConfig(rank=1, target_modules=("roup_up",)))
    with pytest.raises(ConfigError, match="no linear module to adapt"):
        adapted_modules((), LoraConfig(rank=1))


@given(
    out=st.integers(1, 4),
    into=st.integers(1, 4),
    rank=st.integers(1, 3),
    scale=st.floats(0.1, 8.0),
    seed=st.integers(0, 2**31),
)
def test_a_merged_weight_is_the_sum_written_out(out, into, rank, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    base, a, b = (
        torch.randn(shape, generator=generator)
        for shape in ((out, into), (rank, into), (out, rank))
    )
    [found] = merged_weight(base[None], a[None], b[None], scale)
    for i in range(out):
        for j in range(into):
            terms = sum(float(b[i, r]) * float(a[r, j]) for r in range(rank))
            assert float(found[i, j]) == pytest.approx(float(base[i, j]) + scale * terms, abs=1e-4)


def test_several_modules_are_merged_as_each_by_itself():
    draw = torch.Generator().manual_seed(0)
    base, a, b = (torch.randn(shape, generator=draw) for shape in ((3, 5, 7), (3, 2, 7), (3, 5, 2)))
    found = merged_weight(base, a, b, 0.3)
    for i in range(3):
        torch.testing.assert_close(found[i], base[i] + 0.3 * b[i] @ a[i])


def test_a_merge_in_bfloat16_is_rounded_once():
    # bfloat16's step at 1 is 2^-7. The sum 1 + 2^-8 + 2^-17 lies above the middle and is rounded up;
    # B A = 2^-8 + 2^-17 rounded by itself is 2^-8, and 1 + 2^-8 would be rounded down, to even.
    base = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    a = torch.tensor([[[2.0**-9], [2.0**-9], [2.0**-17]]]).bfloat16()
    b = torch.ones(1, 1, 3, dtype=torch.bfloat16)
    merged = merged_weight(base, a, b, 1.0)
    assert merged.dtype == torch.bfloat16
    assert float(merged) == 1 + 2**-7


@pytest.mark.parametrize("width", [4, 40])
def test_every_adapted_weight_is_the_sum_of_its_own_base_and_adapter(width):
    # Of 1,120 elements at width 4 (9,760 at 40) a 32nd are two (all ten) of the o; the others come
    # one by one.
    shapes = {"down": (4, 3 * width), "up": (3 * width, 4), "o": (4, 4), "q": (4, 4)}
    draw = torch.Generator().manual_seed(width)
    state = {
        f"{layer}.{name}.weight": torch.randn(shape, generator=draw)
        for layer in range(10)
        for name, shape in shapes.items()
    }
    kept = {name: value.clone() for name, value in state.items()}
    modules = [name.removesuffix(".weight") for name in state]
    ends = ("down", "up", "o")
    offer = AdapterOffer(state, modules, LoraConfig(rank=2, alpha=6.0, target_modules=ends))
    base = MergeBase(state, offer, torch.device("cpu"))
    for value in state.values():
        value.zero_()  # it is a copy
    for seed in (0, 1, 0):
        draw = torch.Generator().manual_seed(seed)
        offered = {n: torch.randn(v.shape, generator=draw) for n, v in offer.zeros().items()}
        merged = dict(base.merged(offered))
        assert merged.keys() == {name for name in state if name.split(".")[1] in ends}
        for name, weight in merged.items():
            a, b = (offered[n] for n in adapter_names(name.removesuffix(".weight")))
            torch.testing.assert_close(weight, kept[name] + 3.0 * b @ a)


def test_sums_are_made_of_a_small_part_of_the_weights_at_a_time():
    state = {f"{i}.up.weight": torch.zeros(4, 2) for i in range(100)}
    modules = [name.removesuffix(".weight") for name in state]
    offer = AdapterOffer(state, modules, LoraConfig(rank=1))
    merged = dict(MergeBase(state, offer, torch.device("cpu")).merged(offer.zeros()))
    together = Counter(weight.untyped_storage().data_ptr() for weight in merged.values())
    # 800 elements in all, so at most 25 at a time: three modules of 8. 33 * 3 + 1 = 100.
    assert sorted(together.values()) == [1] + [3] * 33
