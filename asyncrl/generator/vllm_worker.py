"""What asyncrl adds to vLLM's workers when one engine has several (engine.tensor_parallel_size > 1).

Worker processes cannot be handed tensors by reference: every worker maps the file that they lie in (the
learner's snapshot itself, or what was fetched of it) and takes its part of them, beside the decode
(shard_server.py) or while the engine is paused. What lies in no file is laid out in one.

vLLM mixes `FileReload` into its worker class in every process
(`worker_extension_cls`).
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from asyncrl.generator.shard_server import ShardServer
from asyncrl.generator.shard_staging import address_of
from asyncrl.generator.vllm_direct import DirectLoader
from asyncrl.weights.manifest import DTYPE_NAMES, TensorSpec, lay_out, tensor_views
from asyncrl.weights.shared_file import SharedFile

SHM_DIR = Path("/dev/shm")

EXTENSION = f"{__name__}.FileReload"


class FileReload:
    """A mix-in for vLLM's worker."""

    direct_loader: DirectLoader | None = None
    """Of this worker's part of the model."""

    shard_server: ShardServer | None = None

    def open_staging(self: Any, directory: str, may_be_direct: bool) -> None:
        """Stage what is asked for at this worker's address in `directory`, beside the decode."""
        loader = _loader_of(self, may_be_direct=may_be_direct)
        self.shard_server = ShardServer(address_of(directory, self.rank), loader, self.device)

    def load_staged(self: Any, number: int) -> None:
        """Load what was staged as `number`.

        Raises:
            WeightMismatchError: that is not what is staged.
        """
        self.shard_server.load(number)
        _wait()

    def load_from_file(
        self: Any, path: str, specs: list[dict[str, Any]], may_be_direct: bool
    ) -> None:
        """Load the tensors that `specs` (dumped TensorSpecs) place in the file `path`."""
        with Path(path).open("rb") as file:
            # Private: torch wants memory that it may write to.
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        views = tensor_views(memoryview(mapping), [TensorSpec(**spec) for spec in specs])
        _loader_of(self, may_be_direct=may_be_direct).load(dict(views))
        _wait()


def _loader_of(worker: Any, *, may_be_direct: bool) -> DirectLoader:  # noqa: ANN401
    """The same at every call."""
    if worker.direct_loader is None:
        worker.direct_loader = DirectLoader(
            worker.get_model(),
            lambda weights: worker.reload_weights(weights_iterator=weights),
            may_be_direct=may_be_direct,
        )
    loader: DirectLoader = worker.direct_loader
    return loader


def _wait() -> None:
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
