"""An adapter merged into the engine's weights: the wire carries the adapter, the engine computes W.

Invariant: what is loaded is W = W_base + scale * B A, computed anew from base weights that are never
written (`weights/adapter.py`); nothing is ever added to the weights of the version before, so a
thousandth version is as exact as the first. Every tensor of an offer is checked before.

Modules of one shape are summed together, a 32nd of the weights at a time (an 8th where that is one
pass): 28 layers of seven modules take 250 calls (40) instead of a thousand. Beside weights and sums
lies the product of one part at most, in one pass nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from asyncrl.config import LoraConfig
from asyncrl.generator.offer import check_offer, collect, state_of
from asyncrl.weights.adapter import (
    adapted_modules,
    adapter_names,
    adapter_state,
    linear_modules,
    merged_weight,
    merges_in_one_pass,
)


class AdapterOffer:
    """What an adapter for one model must consist of."""

    def __init__(
        self, state: Mapping[str, torch.Tensor], linear: Iterable[str], lora: LoraConfig
    ) -> None:
        """For the model whose tensors are `state` (meta will do) and linear modules `linear`.

        Raises:
            ConfigError: lora.target_modules does not fit the model.
        """
        self.modules = adapted_modules(linear, lora)
        self.scale = lora.alpha / lora.rank
        self._expected = adapter_state(state, self.modules, lora.rank)

    def check(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The offer by name.

        Raises:
            WeightMismatchError: a tensor is missing, unknown, there twice, or of another shape or kind.
        """
        offered = collect(tensors)
        check_offer(self._expected, offered)
        return offered

    def zeros(self) -> dict[str, torch.Tensor]:
        """An adapter that changes nothing."""
        return {name: torch.zeros_like(like, device="cpu") for name, like in self._expected.items()}


_NUM_PARTS, _NUM_PARTS_IN_ONE_PASS = 32, 8
"""In how many parts adapted weights are summed, of a module at least: a product takes 4 bytes each."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Adapted modules of one shape."""

    names: list[str]
    """Of their weights."""

    names_a: list[str]
    names_b: list[str]
    weights: torch.Tensor
    """[modules, out, in], as loaded; never written."""


class MergeBase:
    """A copy of the adapted weights as they were loaded, and the sums of it and an adapter."""

    @torch.no_grad()
    def __init__(
        self, weights: Mapping[str, torch.Tensor], offer: AdapterOffer, device: torch.device
    ) -> None:
        """Copy those of `weights` that `offer` adapts to `device`."""
        groups: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for module in offer.modules:
            weight = weights[f"{module}.weight"]
            groups.setdefault((weight.shape, weight.dtype), []).append(module)
        num_elements = sum(shape.numel() * len(group) for (shape, _), group in groups.items())
        num_parts = _NUM_PARTS_IN_ONE_PASS if merges_in_one_pass(device) else _NUM_PARTS
        self._scale = offer.scale
        self._parts = []
        for (shape, _), group in groups.items():
            size = max(1, num_elements // num_parts // shape.numel())
            for start in range(0, len(group), size):
                modules = group[start : start + size]
                names = [f"{module}.weight" for module in modules]
                names_a, names_b = map(list, zip(*map(adapter_names, modules), strict=True))
                stacked = torch.stack([weights[name] for name in names]).to(device)
                self._parts.append(_Part(names, names_a, names_b, stacked))

    def merged(self, offered: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapted weights by name, with an adapter that `AdapterOffer.check` has passed.

        In the order of their shapes, and computed as they are asked for.
        """
        for part in self._parts:
            a = torch.stack([offered[name] for name in part.names_a])
            b = torch.stack([offered[name] for name in part.names_b])
            merged = merged_weight(part.weights, a, b, self._scale)
            yield from zip(part.names, merged.unbind(), strict=True)


class Merger:
    """Merges adapters into a transformers model in place; a copy of the adapted weights is kept."""

    def __init__(self, model: PreTrainedModel, lora: LoraConfig) -> None:
        """For a model with the weights that the learner trains adapters for.

        Raises:
            ConfigError: lora.target_modules does not fit the model.
        """
        self._own = state_of(model)
        linear = linear_modules(model, model.get_output_embeddings())
        self._offer = AdapterOffer(self._own, linear, lora)
        self._base = MergeBase(self._own, self._offer, model.device)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Let the model compute with the adapter `tensors`; nothing of them is kept.

        Raises:
            WeightMismatchError: they do not fit; nothing was written.
        """
        offered = self._offer.check(tensors)
        for name, merged in self._base.merged(offered):
            self._own[name].copy_(merged)
