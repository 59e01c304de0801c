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


class MergedWeights(Mapping[str, torch.Tensor]):
    """A version's weights by name, each computed when it is asked for, so that one exists at a time."""

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        offer: AdapterOffer,
        offered: Mapping[str, torch.Tensor],
        device: torch.device | None = None,
    ) -> None:
        """Over `base`, which is only read; products are computed on `device` (None: where base is)."""
        self._base = base
        self._offered = offered
        self._scale = offer.scale
        self._device = device
        self._factors = {f"{module}.weight": adapter_names(module) for module in offer.modules}

    def __getitem__(self, name: str) -> torch.Tensor:
        base = self._base[name]
        if self._device is not None:
            base = base.to(self._device, non_blocking=True)
        if name not in self._factors:
            return base
        name_a, name_b = self._factors[name]
        return merged_weight(base, self._offered[name_a], self._offered[name_b], self._scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


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
        for name, merged in MergedWeights(self._base, self._offer, offered).items():
            self._own[name].copy_(merged)
