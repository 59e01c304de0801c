"""A version's copy in the generator's GPU, made beside the decode: adopting it is one device copy.

    snapshot in host memory  -> bounce buffer (pinned, one of two)  -> staging buffer on the GPU
         memcpy of a chunk          asynchronous copy, own stream         views of it are offered

Invariant: the staging buffer is written only while nobody holds a view of it that is still in use: the
subscriber stages a version only after the one before was released. The snapshot itself cannot be pinned:
it is mapped privately, and pinning would make a second copy of every page.
"""

import logging
from collections.abc import Iterable

import torch

from asyncrl.weights.manifest import DTYPES, TensorSpec

BOUNCE_BYTES = 32 * 2**20
"""Of each bounce buffer; the copies of a chunk to and from it overlap."""

log = logging.getLogger(__name__)


class DeviceStaging:
    """One buffer on a device, as large as a version, and the way into it; used from one thread."""

    def __init__(self, device: torch.device, *, bounce_bytes: int = BOUNCE_BYTES) -> None:
        """Memory is taken by the first `upload`."""
        self._device = device
        self._bounce_bytes = bounce_bytes
        self._on_gpu = device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._bounces: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._too_large = 2**63
        """Bytes that the device had no room for: not asked for again."""

    def upload(
        self, memory: memoryview, tensors: Iterable[TensorSpec], num_bytes: int
    ) -> list[tuple[str, torch.Tensor]] | None:
        """Copy a snapshot to the device; its tensors there, until the next call.

        None if the device has no room for it: the weights are then adopted from host memory.
        """
        if num_bytes >= self._too_large:
            return None
        try:
            self._prepare(num_bytes)
        except torch.OutOfMemoryError as error:
            self._too_large = num_bytes
            log.warning("no room to stage %d bytes on %s: %s", num_bytes, self._device, error)
            return None
        source = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)
        if self._stream is None:
            self._copy(source)
        else:
            with torch.cuda.stream(self._stream):
                self._copy(source)
            self._stream.synchronize()
        return [(spec.name, self._view(spec)) for spec in tensors]

    def _prepare(self, num_bytes: int) -> None:
        if self._on_gpu and self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if len(self._buffer) != num_bytes:
            # From the stream's own pool: a block that the decode freed may still be read by its kernels.
            with torch.cuda.stream(self._stream):
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if not self._bounces:
            size = min(self._bounce_bytes, num_bytes)
            self._bounces = [
                torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(2)
            ]

    def _copy(self, source: torch.Tensor) -> None:
        sent: list[torch.cuda.Event | None] = [None, None]
        for index, start in enumerate(range(0, len(source), len(self._bounces[0]))):
            which = index % 2
            event = sent[which]
            if event is not None:
                event.synchronize()  # the chunk before the last has left this bounce buffer
            chunk = source[start : start + len(self._bounces[0])]
            bounce = self._bounces[which][: len(chunk)]
            bounce.copy_(chunk)
            self._buffer[start : start + len(chunk)].copy_(bounce, non_blocking=True)
            if self._on_gpu:
                sent[which] = torch.cuda.current_stream().record_event()

    def _view(self, spec: TensorSpec) -> torch.Tensor:
        values = self._buffer[spec.offset : spec.offset + spec.num_bytes]
        return values.view(DTYPES[spec.dtype]).view(spec.shape)
