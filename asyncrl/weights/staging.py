"""A version's copy in the generator's GPU, made beside the decode: adopting it is one device copy.

    pinned host memory (the learner's own snapshot, or what was fetched)  ->  staging buffer on the GPU
                one copy, on a stream of its own                              views of it are offered

All of it is a handful of calls, whatever the size: a thread that needs the interpreter for every chunk
slows down the engine's loop, which needs it too. Digests are compared on the GPU, of the bytes that came.

Invariant: the staging buffer is written only while nobody holds a view of it that is still in use: the
subscriber stages a version only after the one before was released.
"""

import logging
from typing import Protocol

import torch

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.digests import folded_digests
from asyncrl.weights.fetched import Fetched
from asyncrl.weights.manifest import (
    DTYPES,
    TensorSpec,
    find_corrupt_chunk,
    first_difference,
)
from asyncrl.weights.pinning import Pins

log = logging.getLogger(__name__)

_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Staging(Protocol):
    """A way for versions to the devices of an engine, beside its decode; used from one thread."""

    def upload(
        self, fetched: Fetched, *, is_verified: bool
    ) -> list[tuple[str, torch.Tensor]] | None:
        """Bring a version there; what `Engine.adopt` is given of it, until the next call.

        None if there is no room: the weights are then adopted from host memory.

        Raises:
            WeightMismatchError: not `is_verified`, and a chunk does not have its digest.
        """


def staging_on(device: torch.device) -> Staging | None:
    """Of an engine that computes on one device; None if that reads host memory anyway."""
    return DeviceStaging(device) if device.type == "cuda" else None


class DeviceStaging:
    """One buffer on a device, as large as a version, and the way into it; used from one thread."""

    def __init__(self, device: torch.device) -> None:
        """Memory is taken by the first `upload`."""
        self._device = device
        self._pins = Pins() if device.type == "cuda" else None
        self._buffer = _NO_BYTES
        self._specs: tuple[TensorSpec, ...] = ()
        self._views: list[tuple[str, torch.Tensor]] = []
        """Of `_specs` in the buffer: making them takes as long as a copy, and layouts rarely change."""

        self._stream: torch.cuda.Stream | None = None
        self._too_large = 2**63
        """Bytes that the device had no room for: not asked for again."""

    def upload(
        self, fetched: Fetched, *, is_verified: bool
    ) -> list[tuple[str, torch.Tensor]] | None:
        """Copy a version to the device; its tensors there, until the next call.

        None if the device has no room for it: the weights are then adopted from host memory.

        Raises:
            WeightMismatchError: not `is_verified`, and a chunk does not have its digest.
        """
        manifest = fetched.manifest
        if manifest.total_bytes >= self._too_large:
            return None
        try:
            self._prepare(manifest.total_bytes)
            corrupt = self._copy(fetched, is_verified=is_verified)
        except torch.OutOfMemoryError as error:
            self._too_large = manifest.total_bytes
            self._forget()
            log.warning("no room to stage %d bytes: %s", manifest.total_bytes, error)
            return None
        if corrupt is not None:
            raise WeightMismatchError(manifest.corruption(corrupt, "the learner's snapshot"))
        if manifest.tensors != self._specs:
            self._views = [(spec.name, self._view(spec)) for spec in manifest.tensors]
            self._specs = manifest.tensors
        return list(self._views)

    def _forget(self) -> None:
        """Give the buffer's memory back."""
        self._buffer = _NO_BYTES
        self._specs, self._views = (), []

    def _copy(self, fetched: Fetched, *, is_verified: bool) -> int | None:
        """Fill the buffer; the first chunk in it that is wrong. `fetched` is not read afterwards."""
        if self._pins is not None:
            self._pins.pin(fetched.block, fetched.block.memory)
        source = torch.frombuffer(
            fetched.block.memory, dtype=torch.uint8, count=fetched.manifest.total_bytes
        )
        try:
            with torch.cuda.stream(self._stream):
                self._buffer.copy_(source, non_blocking=True)
                return None if is_verified else self._find_corrupt(fetched)
        finally:
            if self._stream is not None:
                self._stream.synchronize()

    def _prepare(self, num_bytes: int) -> None:
        if self._pins is not None and self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if len(self._buffer) != num_bytes:
            self._forget()
            # From the stream's own pool: a block that the decode freed may still be read by its kernels.
            with torch.cuda.stream(self._stream):
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _find_corrupt(self, fetched: Fetched) -> int | None:
        manifest = fetched.manifest
        if manifest.digest_kind != "folded":
            return find_corrupt_chunk(memoryview(fetched.block.memory), manifest)
        return first_difference(folded_digests(self._buffer, manifest.chunk_bytes), manifest)

    def _view(self, spec: TensorSpec) -> torch.Tensor:
        values = self._buffer[spec.offset : spec.offset + spec.num_bytes]
        return values.view(DTYPES[spec.dtype]).view(spec.shape)
