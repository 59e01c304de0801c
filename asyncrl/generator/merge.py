"""An adapter merged into the engine's weights: the wire carries the adapter, the engine computes W.

Invariant: what is loaded is W = W_base + scale * B A, computed anew from base weights that are never
written (`weights/adapter.py`); nothing is ever added to the weights of the version before, so a
thousandth version is as exact as the first. Every tensor of an offer is checked before.
"""

from collections.abc import Iterable, Iterator, Mapping

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


def merge(
    base: Mapping[str, torch.Tensor], offer: AdapterOffer, offered: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `base` by name: merged anew where it is adapted, else itself. One at a time."""
    factors = {f"{module}.weight": adapter_names(module) for module in offer.modules}
    for name, weight in base.items():
        if name in factors:
            name_a, name_b = factors[name]
            yield name, merged_weight(weight, offered[name_a], offered[name_b], offer.scale)
        else:
            yield name, weight


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
        names = [f"{module}.weight" for module in self._offer.modules]
        self._base = {name: self._own[name].detach().clone() for name in names}

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Let the model compute with the adapter `tensors`; nothing of them is kept.

        Raises:
            WeightMismatchError: they do not fit; nothing was written.
        """
        offered = self._offer.check(tensors)
        for name, merged in merge(self._base, self._offer, offered):
            self._own[name].copy_(merged)
