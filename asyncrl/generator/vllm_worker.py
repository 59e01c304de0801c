"""What asyncrl adds to vLLM's workers when one engine has several (engine.tensor_parallel_size > 1).

Worker processes cannot be handed tensors by reference: every worker maps the file that they lie in (the
learner's snapshot itself, or what was fetched of it) and loads its own shard through vLLM's own loaders.
What lies in none is laid out in one. vLLM mixes `FileReload` into its worker class in every process
(`worker_extension_cls`).
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from asyncrl.weights.manifest import DTYPE_NAMES, TensorSpec, lay_out, tensor_views
from asyncrl.weights.shared_file import SharedFile

SHM_DIR = Path("/dev/shm")

EXTENSION = f"{__name__}.FileReload"


class _Worker(Protocol):
    """The part of vLLM's worker that is used."""

    def reload_weights(self, *, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load a whole checkpoint into the running model."""


class FileReload:
    """A mix-in for vLLM's worker."""

    def reload_from_file(self: _Worker, path: str, specs: list[dict[str, Any]]) -> None:
        """Load the tensors that `specs` (dumped TensorSpecs) place in the file `path`."""
        with Path(path).open("rb") as file:
            # Private: torch wants memory that it may write to.
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        views = tensor_views(memoryview(mapping), [TensorSpec(**spec) for spec in specs])
        self.reload_weights(weights_iterator=views)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@contextmanager
def shared_file(tensors: Mapping[str, torch.Tensor]) -> Iterator[SharedFile]:
    """The tensors in one file of shared memory, gone when the block ends.

    Raises:
        OSError: no room in shared memory.
    """
    entries = [(name, DTYPE_NAMES[v.dtype], tuple(v.shape)) for name, v in tensors.items()]
    specs, num_bytes = lay_out(entries)
    descriptor, path = tempfile.mkstemp(prefix="asyncrl-reload-", dir=SHM_DIR)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        mapping = mmap.mmap(descriptor, num_bytes)
        for name, view in tensor_views(memoryview(mapping), specs):
            view.copy_(tensors[name])
        yield SharedFile(path, specs)
    finally:
        os.close(descriptor)
        Path(path).unlink()


def as_arguments(file: SharedFile) -> tuple[str, list[dict[str, Any]]]:
    """The file as a worker's methods take it: they are called over a pipe."""
    return file.path, [spec.model_dump() for spec in file.tensors]
