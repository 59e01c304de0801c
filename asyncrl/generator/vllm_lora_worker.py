"""What asyncrl adds to vLLM's workers when versions are adapters: one is handed over in memory.

vLLM itself loads adapters from a folder only. `put_adapter` makes one from PEFT's tensors and registers
it; it is copied to a slot of the device by the first step that needs it. To do that here would move
others out of their slots while a batch computes with them. With one worker the tensors come by
reference, with several through a file in shared memory.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.manifest import TensorSpec, tensor_views

EXTENSION = f"{__name__}.AdapterWorker"


class AdapterWorker:
    """A mix-in for vLLM's worker; no method may be called as one of another mix-in in its process."""

    def put_adapter(
        self: Any,
        number: int,
        tensors: Mapping[str, torch.Tensor],
        settings: dict[str, Any],
    ) -> None:
        """Register an adapter of PEFT's tensors under the id `number`; nothing of them is kept.

        Raises:
            WeightMismatchError: vLLM has none of the modules that an adapted one belongs to.
        """
        worker_manager = self.model_runner.lora_manager
        manager = worker_manager._adapter_manager
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=number,
            tensors=_copies(tensors, worker_manager.device, worker_manager.lora_config.lora_dtype),
            peft_helper=PEFTHelper.from_dict(settings),
            # Not "cpu" beside a GPU: that would pin each tensor on its own.
            device=str(worker_manager.device),
            dtype=worker_manager.lora_config.lora_dtype,
            weights_mapper=_renames(manager.model),
        )
        manager.add_adapter(adapter)
        unknown = adapter.loras.keys() - manager.modules.keys()
        if unknown:
            manager.remove_adapter(number)
            raise WeightMismatchError(
                f"vLLM cannot adapt {min(unknown)!r} and {len(unknown) - 1} other modules of this "
                "model; choose lora.target_modules without them, or lora.serving='merged'"
            )

    def put_adapter_from_file(
        self: Any, number: int, path: str, specs: list[dict[str, Any]], settings: dict[str, Any]
    ) -> None:
        """The same with tensors that `specs` (dumped TensorSpecs) place in the file `path`."""
        with Path(path).open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        views = tensor_views(memoryview(mapping), [TensorSpec(**spec) for spec in specs])
        self.put_adapter(number, dict(views), settings)


def _copies(
    tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors on the device. vLLM scales B in place, so never the caller's own memory.

    On a GPU they are copied beside the batch in flight, which the caller need not wait for.
    """
    if device.type != "cuda":
        return {name: value.to(device, dtype, copy=True) for name, value in tensors.items()}
    current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(aside):
        copies = {name: value.to(device, dtype, copy=True) for name, value in tensors.items()}
    aside.synchronize()
    for value in copies.values():
        value.record_stream(current)
    return copies


def _renames(model: object) -> Any:  # noqa: ANN401
    """How vLLM's model calls what transformers calls otherwise; None: the same."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for method in ("get_rename_mapper", "get_unstacked_mapper"):  # since 0.32, and before
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    return mapper
