"""What asyncrl adds to vLLM's workers when versions are adapters: one is handed over in memory.

vLLM itself loads adapters from a folder only. `put_adapter` makes one from PEFT's tensors, registers it,
and copies it to a slot of the device that is free. If none is, vLLM does that in the first step that
needs it: others must leave their slots, and a batch may compute with them. With one worker the tensors
come by reference, with several through a file in shared memory.

An adapter of 28 layers has 392 tensors, and a call for each of them costs more than its bytes. So they
are copied by one call and scaled by another, and vLLM gets views of the copy; its names for the modules
are looked up once. Its own way into a slot are two fills and two copies for each module, 784 calls (8 to
13 ms on an H200's host): the first adapter of a slot takes it, and its copies are repeated for the later
ones (copy_plan.py). All adapters of an engine consist of the same tensors, so what was filled stays so.
"""

import functools
import logging
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
from asyncrl.generator.copy_plan import CopyPlan, record_copies
from asyncrl.weights.manifest import TensorSpec, tensor_views

log = logging.getLogger(__name__)

EXTENSION = f"{__name__}.AdapterWorker"

Names = dict[str, tuple[str, str]]
"""What A and B are called when they are published, by vLLM's name of the module."""


class AdapterWorker:
    """A mix-in for vLLM's worker; no method may be called as one of another mix-in in its process."""

    adapter_names: Mapping[tuple[str, ...], Names] = MappingProxyType({})
    """By the names of the tensors, which hardly ever change: those of the last adapter."""

    slot_plans: Mapping[int, CopyPlan] | None = MappingProxyType({})
    """How adapters get into a slot, by its number; None: vLLM's way there does more than copy."""

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
        copies = _copies(
            [tensors[name_a] for name_a, _ in names.values()],
            [tensors[name_b] for _, name_b in names.values()],
            scale,
            worker_manager.device,
            worker_manager.lora_config.lora_dtype,
        )
        factors = dict(zip(names, copies, strict=True))
        loras = {
            # alpha = rank: B is scaled already.
            module: LoRALayerWeights(module, rank, rank, a, b, scaling=1)
            for module, (a, b) in factors.items()
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
        if self.slot_plans is not None and None in manager.lora_index_to_id:
            parts = {
                f"{module} {factor}": values
                for module, pair in factors.items()
                for factor, values in zip("AB", pair, strict=True)
            }
            self.slot_plans = _fill_slot(manager, number, parts, self.slot_plans)

    def put_adapter_from_file(
        self: Any, number: int, path: str, specs: list[dict[str, Any]], rank: int, scale: float
    ) -> None:
        """The same with tensors that `specs` (dumped TensorSpecs) place in the file `path`."""
        with Path(path).open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        views = tensor_views(memoryview(mapping), [TensorSpec(**spec) for spec in specs])
        self.put_adapter(number, dict(views), rank, scale)


@torch.inference_mode()
def _fill_slot(
    manager: Any,  # noqa: ANN401
    number: int,
    parts: Mapping[str, torch.Tensor],
    plans: Mapping[int, CopyPlan],
) -> Mapping[int, CopyPlan] | None:
    """Bring an adapter to the slot that vLLM would choose; the plans known then.

    After the batch in flight, which does not read that slot: both are on the device's current stream.
    """
    index = manager.lora_index_to_id.index(None)
    if index in plans:
        plans[index].carry_out(parts)
        manager.lora_index_to_id[index] = number
        manager._active_adapters[number] = None
        return plans
    try:
        plan = record_copies(parts, lambda: manager.activate_adapter(number))
    except ValueError as error:
        log.info("adapters are brought to their slots by vLLM alone: %s", error)
        manager.deactivate_adapter(number)
        return None
    return {**plans, index: plan}


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
