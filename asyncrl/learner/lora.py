"""LoRA on the learner's side: PEFT's layers inside the model, and nothing else trained.

Only the adapter's matrices have gradients, so optimizer, clipping, snapshots and checkpoints, which all
walk `Policy.named_weights`, see the adapter alone. Invariants: B = 0 at first, so version 0 is model.path
bit for bit; the frozen weights never change, so with the adapter switched off the policy IS model.path,
at every version and after every resume: the reference policy of a KL term needs no second copy.

A checkpoint holds adapter_model.safetensors and adapter_config.json, which PEFT, transformers and vLLM
read as they are; the frozen weights stay in model.path.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config import LoraConfig
from asyncrl.errors import CheckpointError
from asyncrl.extras import check_peft
from asyncrl.weights.adapter import adapted_modules, adapter_names, linear_modules

log = logging.getLogger(__name__)

WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = "default"
"""PEFT's name of the one adapter; it stands in no file."""


class SavesPretrained(Protocol):
    """The settings in PEFT's form."""

    def save_pretrained(self, save_directory: str) -> None:
        """Write adapter_config.json into a folder."""


class Adapter:
    """The adapter inside a model; made by `attach`."""

    def __init__(self, model: nn.Module, modules: list[str], config: SavesPretrained) -> None:
        self._layers: list[Any] = [model.get_submodule(name) for name in modules]
        self._modules = modules
        self._config = config

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """A and B of every adapted module under their published names, always the present ones."""
        for module, layer in zip(self._modules, self._layers, strict=True):
            name_a, name_b = adapter_names(module)
            yield name_a, layer.lora_A[_NAME].weight
            yield name_b, layer.lora_B[_NAME].weight

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Within the block the model computes with its frozen weights alone."""
        # enable_adapters() would take requires_grad away, beside the graph of a running step.
        scales = [layer.scaling[_NAME] for layer in self._layers]
        for layer in self._layers:
            layer.set_scale(_NAME, 0.0)
        try:
            yield
        finally:
            for layer, scale in zip(self._layers, scales, strict=True):
                layer.scaling[_NAME] = scale

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the gathered `weights` and the settings as PEFT does."""
        save_file(
            {name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS_FILE
        )
        self._config.save_pretrained(str(folder))

    def load(self, folder: Path) -> None:
        """Take over the weights of a checkpoint; before the model is sharded.

        Raises:
            CheckpointError: it has other tensors.
        """
        stored = load_file(folder / WEIGHTS_FILE)
        own = dict(self.named_weights())
        if stored.keys() != own.keys():
            raise CheckpointError(
                f"{folder} holds an adapter of other modules: "
                f"{sorted(stored.keys() ^ own.keys())[0]!r} and others differ"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(stored[name])


def attach(model: PreTrainedModel, lora: LoraConfig, *, seed: int, path: str) -> Adapter:
    """Put an adapter into the model and freeze the rest; before it is sharded.

    Args:
        model: a causal language model, changed in place.
        lora: the section, rank > 0.
        seed: of the run; A is drawn from it and nothing else, the same on every rank.
        path: model.path, for whoever loads a checkpoint.

    Raises:
        ConfigError: peft is not installed, or lora.target_modules does not fit the model.
    """
    check_peft(lora.rank)
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    modules = adapted_modules(linear_modules(model, model.get_output_embeddings()), lora)
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(path).resolve()) if Path(path).exists() else path,
    )
    inject_adapter_in_model(settings, model, adapter_name=_NAME)  # it freezes all else
    adapter = Adapter(model, modules, settings)
    _initialise(adapter, seed)
    size = sum(value.numel() for _, value in adapter.named_weights())
    log.info(
        "LoRA: %d parameters in %d modules (rank %d, scale %g); the weights of %s are frozen",
        size, len(modules), lora.rank, lora.alpha / lora.rank, path,
    )  # fmt: skip
    return adapter


def _initialise(adapter: Adapter, seed: int) -> None:
    """A uniform in +-1/sqrt(in), as PEFT draws it (Kaiming with a = sqrt 5), B zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter.named_weights():
            drawn = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            parameter.copy_(drawn)
