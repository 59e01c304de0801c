"""A version's weights, copied out of the model while the learner stands still.

Invariant: once `take` has returned, nothing that the learner does changes the snapshot, and no
byte of it is written again before the publisher has given its buffer back.

Every rank enters `take`, because FSDP2 shards are gathered collectively; one tensor is whole at a
time, and only the rank that has buffers keeps it. Floating-point tensors are cast to the
publication dtype on the device before they are gathered or copied, so fewer bytes move. On a GPU
the host buffers are registered with CUDA (pinning.py), so copies run at the speed of the bus and
overlap.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.buffers import HostBuffer, HostBuffers
from asyncrl.weights.manifest import DTYPE_NAMES, DTYPES, TensorSpec, lay_out, tensor_views
from asyncrl.weights.pinning import Pins

PublicationDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The weights of one version in host memory; whoever publishes it gives the buffer back."""

    version: int
    tensors: tuple[TensorSpec, ...]
    buffer: HostBuffer


def named_weights(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(state dict name, tensor) of parameters and persistent buffers; tied ones come once."""
    state = module.state_dict(keep_vars=True)
    return _without_ties((name, value) for name, value in state.items())


def snapshot_bytes(
    tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: PublicationDtype | None
) -> int:
    """Size of a snapshot of `tensors` cast to `dtype`."""
    return _lay_out(_without_ties(tensors), dtype)[1]


class Snapshotter:
    """Takes snapshots of a fixed list of tensors, which the optimizer changes in place."""

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: PublicationDtype | None,
        buffers: HostBuffers | None,
    ) -> None:
        """Snapshots of `tensors` (see `named_weights`) go to `buffers`.

        Args:
            tensors: plain tensors or DTensors; those that share memory are taken once.
            dtype: what floating-point tensors are cast to; None keeps each tensor's own.
            buffers: the publisher's; None on the ranks that only take part in the gathering.

        Raises:
            WeightMismatchError: a dtype that cannot be published.
            OSError: no room for the buffers.
        """
        self._tensors = _without_ties(tensors)
        self._specs, self._num_bytes = _lay_out(self._tensors, dtype)
        self._buffers = buffers
        self._on_gpu = any(_device_type(tensor) == "cuda" for _, tensor in self._tensors)
        self._pins = Pins()
        if buffers is not None:
            for buffer in buffers.prepare(self._num_bytes):
                self._pin(buffer)

    @torch.no_grad()
    def take(self, version: int) -> Snapshot | None:
        """Copy every tensor as it is now; None on a rank without buffers. Collective over ranks."""
        if self._buffers is None:
            for spec, (_, tensor) in zip(self._specs, self._tensors, strict=True):
                _gather(tensor, DTYPES[spec.dtype])
            return None
        buffer = self._buffers.acquire(self._num_bytes)
        self._pin(buffer)
        views = tensor_views(memoryview(buffer.mapping), self._specs)
        for (_, view), (_, tensor) in zip(views, self._tensors, strict=True):
            view.copy_(_gather(tensor, view.dtype), non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return Snapshot(version=version, tensors=self._specs, buffer=buffer)

    def _pin(self, buffer: HostBuffer) -> None:
        if self._on_gpu:
            self._pins.pin(buffer, buffer.mapping)


def _gather(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor; a collective for a DTensor. On a GPU it is already cast to `dtype`."""
    if isinstance(tensor, DTensor):
        return cast(DTensor, tensor.detach().to(_device_type(tensor), dtype)).full_tensor()
    # A CPU copy casts on its way; from a GPU the cast shall come before the bus.
    return tensor.detach().to(dtype) if tensor.is_cuda else tensor.detach()


def _device_type(tensor: torch.Tensor) -> str:
    """Where `_gather` gives it: shards offloaded to the CPU are gathered on the mesh's device."""
    return tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type


def _without_ties(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> list[tuple[str, torch.Tensor]]:
    seen = set()
    kept = []
    for name, tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() and not local.is_meta:
            place = (local.data_ptr(), local.shape, local.stride(), local.dtype)
            if place in seen:
                continue
            seen.add(place)
        kept.append((name, tensor))
    return kept


def _lay_out(
    tensors: list[tuple[str, torch.Tensor]], dtype: PublicationDtype | None
) -> tuple[tuple[TensorSpec, ...], int]:
    entries = []
    for name, tensor in tensors:
        published = DTYPE_NAMES.get(tensor.dtype)
        if published is None:
            raise WeightMismatchError(
                f"{name} is {tensor.dtype}, only {', '.join(DTYPES)} can be published"
            )
        if dtype is not None and tensor.dtype.is_floating_point:
            published = dtype
        entries.append((name, published, tuple(tensor.shape)))
    return lay_out(entries)
