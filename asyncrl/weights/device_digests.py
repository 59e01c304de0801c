"""Folded digests of host memory whose sums are made on a GPU: the host's cores stay with the learner.

    host memory, a piece of some chunks  ->  scratch on the device  ->  their column sums, kept there
    all sums to the host at once         ->  SHA-256 of each chunk's sums and of what no row holds

Every byte crosses the bus once, at its speed if the memory is pinned (pinning.py). A piece takes a
handful of calls, and only the last waits for the device: a thread that often needs the interpreter slows
down whoever trains beside it.
"""

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.weights.digests import FOLD_WORDS, digest_chunks, seal

log = logging.getLogger(__name__)

_ROW_BYTES = 8 * FOLD_WORDS
_NO_WORDS = torch.empty(0, dtype=torch.int64)


class DeviceDigester:
    """Digests versions on one device; used from one thread."""

    def __init__(self, device: torch.device, *, piece_bytes: int = 64 * 2**20) -> None:
        """Memory is taken by the first version: the bytes that are copied at a time, and the sums."""
        self._device = device
        self._piece_bytes = piece_bytes
        self._words = _NO_WORDS
        """The scratch: what is copied as bytes is summed as words."""

        self._stream: torch.cuda.Stream | None = None
        self._has_room = True

    def digest_chunks(self, buffer: memoryview, chunk_bytes: int) -> tuple[bytes, ...]:
        """`digests.digest_chunks` of `buffer`, "folded"; nothing reads it afterwards.

        The host does it if a chunk is not whole words, and for good once the device had no room.
        """
        if self._has_room and chunk_bytes % 8 == 0:
            try:
                return self._digest(buffer, chunk_bytes)
            except torch.OutOfMemoryError as error:
                self._has_room = False
                self._words = _NO_WORDS
                log.warning(
                    "no room on %s for digests, the host makes them: %s", self._device, error
                )
        return digest_chunks(buffer, chunk_bytes, "folded")

    def _digest(self, buffer: memoryview, chunk_bytes: int) -> tuple[bytes, ...]:
        if self._device.type == "cuda" and self._stream is None:
            # Little work that generators wait for: it goes before the learner's own kernels.
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        try:
            with torch.cuda.stream(self._stream):
                sums = self._sum_columns(torch.frombuffer(buffer, dtype=torch.uint8), chunk_bytes)
        finally:
            if self._stream is not None:
                self._stream.synchronize()
        digests = []
        for index, start in enumerate(range(0, len(buffer), chunk_bytes)):
            end = min(start + chunk_bytes, len(buffer))
            rest = end - (end - start) % _ROW_BYTES
            digests.append(seal(sums[index], buffer[rest:end]))
        return tuple(digests)

    def _sum_columns(self, source: torch.Tensor, chunk_bytes: int) -> NDArray[np.int64]:
        """The column sums [chunks, 1031] of every chunk of `source` [N] uint8."""
        num_whole, rest = divmod(len(source), chunk_bytes)
        per_piece = max(1, self._piece_bytes // chunk_bytes)
        num_words = -(-min(len(source), per_piece * chunk_bytes) // 8)
        if len(self._words) < num_words:
            self._words = torch.empty(num_words, dtype=torch.int64, device=self._device)
        scratch = self._words.view(torch.uint8)
        sums = torch.empty(
            (num_whole + (rest > 0), FOLD_WORDS), dtype=torch.int64, device=self._device
        )
        whole = num_whole * chunk_bytes
        pieces = source[:whole].split(per_piece * chunk_bytes)
        for piece, found in zip(pieces, sums[:num_whole].split(per_piece), strict=True):
            self._fold(scratch, piece, chunk_bytes, found)
        if rest:
            self._fold(scratch, source[whole:], rest, sums[num_whole:])
        on_host: NDArray[np.int64] = sums.cpu().numpy()
        return on_host

    def _fold(
        self, scratch: torch.Tensor, piece: torch.Tensor, chunk_bytes: int, sums: torch.Tensor
    ) -> None:
        """Copy `piece` and sum each of its chunks' columns: `sums` [chunks, 1031]."""
        scratch[: len(piece)].copy_(piece, non_blocking=True)
        shape = (len(sums), chunk_bytes // _ROW_BYTES, FOLD_WORDS)
        rows = self._words.as_strided(shape, (chunk_bytes // 8, FOLD_WORDS, 1))
        torch.sum(rows, 1, out=sums)
