"""What asyncrl adds to vLLM's workers when versions are adapters: one is handed over in memory.

vLLM itself loads adapters from a folder only. `put_adapter` makes one from PEFT's tensors and registers
it; it is copied to a slot of the device by the first step that needs it. To do that here would move
others out of their slots while a batch computes with them. With one worker the tensors come by
reference, with several through a file in shared memory.

An adapter of 28 layers has 392 tensors, and a call for each of them costs more than its bytes. So they
are copied by one call and scaled by another, and vLLM gets views of the copy; its names for the modules
are looked up once.
"""

import functools
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.manifest import TensorSpec, tensor_views

EXTENSION = f"{__name__}.AdapterWorker"

Names = dict[str, tuple[str, str]]
"""What A and B are called when they are published, by vLLM's name of the module."""


class AdapterWorker:
    """A mix-in for vLLM's worker; no method may be called as one of another mix-in in its process."""

    adapter_names: Mapping[tuple[str, ...], Names] = MappingProxyType({})
    """By the names of the tensors, which hardly ever change: those of the last adapter."""

    def put_adapter(
        self: Any, number: int, tensors: Mapping[str, torch.Tensor], rank: int, scale: float
    ) -> None:
        """Register an adapter of PEFT's tensors under the id `number`; nothing of them is kept.

        Raises:
            WeightMismatchError: vLLM has none of the modules that an adapted one belongs to.
        """
        worker_manager = self.model_runner.lora_manager
        manager = worker_manager._adapter_manager
        names: Names | None = self.adapter_names.get(tuple(tensors))
        if names is None:
            names = _names(tensors, _renames(manager.model))
            self.adapter_names = {tuple(tensors): names}
        factors = _copies(
            [tensors[name_a] for name_a, _ in names.values()],
            [tensors[name_b] for _, name_b in names.values()],
            scale,
            worker_manager.device,
            worker_manager.lora_config.lora_dtype,
        )
        loras = {
            # alpha = rank: B is scaled already.
            module: LoRALayerWeights(module, rank, rank, a, b, scaling=1)
            for module, (a, b) in zip(names, factors, strict=True)
        }
        adapter = LoRAModel(number, rank, loras)
        manager.add_adapter(adapter)
        unknown = adapter.loras.keys() - manager.modules.keys()
        if unknown:
            manager.remove_adapter(number)
            raise WeightMismatchError(
                f"vLLM cannot adapt {min(unknown)!r} and {len(unknown) - 1} other modules of this "
                "model; choose lora.target_modules without them, or lora.serving='merged'"
            )

    def put_adapter_from_file(
        self: Any, number: int, path: str, specs: list[dict[str, Any]], rank: int, scale: float
    ) -> None:
        """The same with tensors that `specs` (dumped TensorSpecs) place in the file `path`."""
        with Path(path).open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        views = tensor_views(memoryview(mapping), [TensorSpec(**spec) for spec in specs])
        self.put_adapter(number, dict(views), rank, scale)


@torch.inference_mode()
def _copies(
    list_a: list[torch.Tensor],
    list_b: list[torch.Tensor],
    scale: float,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """(A, scale * B) of every module: parts of one new piece of memory on the device.

    On a GPU it is filled beside the batch in flight, which the caller need not wait for.
    """
    tensors = list_a + list_b
    aside = _stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(aside):
        flat = _flatten_dense_tensors(tensors).to(device, dtype)
        flat[sum(values.numel() for values in list_a) :].mul_(scale)
    if aside is not None:
        aside.synchronize()
        flat.record_stream(torch.cuda.current_stream(device))
    views = _unflatten_dense_tensors(flat, tensors)
    return zip(views[: len(list_a)], views[len(list_a) :], strict=True)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all adapters: memory is only used again by the stream that it was taken for."""
    return torch.cuda.Stream(device)


def _names(tensors: Iterable[str], renames: Any) -> Names:  # noqa: ANN401
    """Where vLLM puts the tensors of these names; every A has its B."""
    found: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for name in tensors:
        module, is_a = parse_fine_tuned_lora_name(name, renames)
        found[0 if is_a else 1][module] = name
    return {module: (name_a, found[1][module]) for module, name_a in found[0].items()}


def _renames(model: object) -> Any:  # noqa: ANN401
    """How vLLM's model calls what transformers calls otherwise; None: the same."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for method in ("get_rename_mapper", "get_unstacked_mapper"):  # since 0.32, and before
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    return mapper
