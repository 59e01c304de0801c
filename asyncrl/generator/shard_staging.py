"""A version's parts on the devices of an engine with several workers, brought there beside the decode.

    generator's process (ShardedStaging)           every worker (ShardServer, a thread)
    {number, path, tensors}      -- a socket -->   maps the file, once for all versions written to it
    compares digests meanwhile                     copies its part to memory beside the model's own
                                 <-- "staged" --
    ... the engine is paused     "load_staged" ->  one device copy into the parameters

What a worker's part is follows from the copies that its own loader made (copy_plan.py), so there is
none before the first version was adopted, and none if the trial of vllm_direct.py failed: then, and
if a device has no room, a version is adopted from its file while the engine is paused.

Invariant: a worker's part is written only while nobody waits to adopt it: the subscriber stages a
version only after the one before was released; and what is adopted has the number that was staged.
If one worker can never stage, the others give back what they have taken for it.
"""

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field

from asyncrl.errors import PeerLostError, WeightMismatchError
from asyncrl.generator.copy_plan import CopyPlan
from asyncrl.generator.vllm_direct import DirectLoader
from asyncrl.weights.fetched import Fetched
from asyncrl.weights.manifest import DTYPES, TensorSpec, find_corrupt_chunk, tensor_views
from asyncrl.weights.pinning import Pins
from asyncrl.weights.shared_file import MappedFile, OpenFile
from asyncrl.weights.switching import quick_switches

log = logging.getLogger(__name__)

_ANSWER_S = 120.0
"""Pinning a file for the first time takes a second for some GB."""

_CONNECT_S = 60.0
_MAX_TEMP = 60
"""Bytes of a folder's name; an address of a socket has at most 107."""

Answer = Literal["staged", "not yet", "never"]
"""Of a worker. Never: the trial has failed, or the device has no room."""

_NO_MORE = b""
"""Instead of a request: nothing will be staged; what was taken for it is given back."""


class StageRequest(BaseModel):
    """What a worker is asked: JSON, as all that follows on the socket."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    number: int = Field(ge=1)
    """Rises with every version that is offered."""

    path: str
    """Of the file that holds the tensors."""

    tensors: tuple[TensorSpec, ...] = Field(strict=False)


class StagedShard:
    """Memory beside a model's own for all that a plan copies into it."""

    def __init__(self, plan: CopyPlan) -> None:
        """Take the memory, on the plan's devices.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        self._plan = plan
        self._device = plan.targets[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        # From the stream's own pool: a block that the decode freed may still be read by its kernels.
        with torch.cuda.stream(self._stream):
            self._pieces = [torch.empty_like(target) for target in plan.targets]

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the parts of `tensors`, which lie in (pinned) host memory; returns when they are there.

        Whole rows are copied alone; of a tensor that is cut by columns all of it goes to the device
        first, because the bus takes no strides.

        Raises:
            ValueError: a tensor is missing, or does not lie in memory as the recorded one did.
        """
        sources = self._plan.sources(tensors)
        whole = [i for i, source in enumerate(sources) if source.is_contiguous()]
        try:
            with torch.cuda.stream(self._stream):
                torch._foreach_copy_(
                    [self._pieces[i] for i in whole], [sources[i] for i in whole], non_blocking=True
                )
                for i in sorted(set(range(len(sources))) - set(whole)):
                    part = self._plan.parts[i]
                    there = tensors[part.name].to(self._device, non_blocking=True)
                    self._pieces[i].copy_(part.of(there))
        finally:
            if self._stream is not None:
                self._stream.synchronize()  # the file may be written again after an error too

    def load(self) -> None:
        """Copy it into the model."""
        self._plan.carry_out_from(self._pieces)


class ShardServer:
    """A worker's end: a thread that stages what it is told to."""

    def __init__(self, address: str, loader: DirectLoader, device: torch.device) -> None:
        """Listen at `address` for versions of the model that `loader` loads on `device`."""
        self._number = 0  # of what is staged; 0: nothing
        self._loader = loader
        self._device = device
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(address)
        self._socket.listen(1)
        self._socket.settimeout(_CONNECT_S)
        self._files: dict[tuple[int, int], MappedFile] = {}
        self._pins = Pins() if device.type == "cuda" else None
        self._shard: StagedShard | None = None
        self._thread = threading.Thread(target=self._serve, name="shards", daemon=True)
        self._thread.start()

    def load(self, number: int) -> None:
        """Copy the parts that were staged as `number` into the model.

        Raises:
            WeightMismatchError: they are not there.
        """
        if self._shard is None or self._number != number:
            raise WeightMismatchError(
                f"the weights to be adopted were staged as number {number}, this worker has "
                f"{self._number}"
            )
        self._shard.load()

    def _serve(self) -> None:
        with self._socket:
            accepted, _ = self._socket.accept()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        # Until the generator ends: with it this process may, and no memory is freed in a thread then.
        with suppress(EOFError, ConnectionError), Connection(accepted.detach()) as connection:
            while (message := connection.recv_bytes()) != _NO_MORE:
                request = StageRequest.model_validate_json(message)
                with quick_switches:
                    answer = self._stage(request)
                connection.send_bytes(answer.encode())
            self._number, self._shard, self._files = 0, None, {}

    def _stage(self, request: StageRequest) -> Answer:
        plan = self._loader.plan
        if plan is None:
            return "never" if self._loader.direct is False else "not yet"
        self._number = 0
        try:
            if self._shard is None:
                self._shard = StagedShard(plan)
            memory = memoryview(self._mapped(request.path).memory)
            self._shard.fill(dict(tensor_views(memory, request.tensors)))
        except torch.OutOfMemoryError as error:
            self._shard = None
            log.warning("no room to stage versions beside the model: %s", error)
            return "never"
        except ValueError as error:  # the engine says what is wrong with what it is offered
            log.warning("a version was not staged: %s", error)
            return "not yet"
        self._number = request.number
        return "staged"

    def _mapped(self, path: str) -> MappedFile:
        """The file in this process's memory, pinned."""
        file = OpenFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        key = file.identity
        # What lost its name is written to no more; what never had one is its owner's only file.
        self._files = {k: b for k, b in self._files.items() if k == key or b.file.has_name}
        block = self._files.get(key)
        if block is None:
            block = self._files[key] = MappedFile(file, os.fstat(file.fd).st_size, "shared")
            if self._pins is not None:
                self._pins.pin(block, block.memory)
        return block


class ShardedStaging:
    """The generator's end; `upload` is called from the subscriber's thread."""

    def __init__(
        self,
        num_workers: int,
        *,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Choose where the workers listen; `connect` when they do.

        `guard` is around every wait for them, and may put an error of its own in an error's place.
        """
        self.number = 0
        """Of the version that was offered to the workers last."""

        temp = tempfile.gettempdir()
        short = temp if len(os.fsencode(temp)) <= _MAX_TEMP else "/tmp"
        self._folder = tempfile.TemporaryDirectory(prefix="asyncrl-shards-", dir=short)
        self._num_workers = num_workers
        self._guard = guard
        self._connections: list[Connection] = []
        self._is_possible = True

    @property
    def directory(self) -> str:
        """Worker i listens at `address_of(directory, i)`."""
        return self._folder.name

    def connect(self) -> None:
        """Once all of them listen; the folder is not needed any more then."""
        for rank in range(self._num_workers):
            self._connections.append(Client(address_of(self.directory, rank), family="AF_UNIX"))
        self._folder.cleanup()

    def upload(
        self, fetched: Fetched, *, is_verified: bool
    ) -> list[tuple[str, torch.Tensor]] | None:
        """Have every worker copy its part; the version's tensors without values, on device "meta".

        None if a worker cannot: the weights are then adopted from host memory.

        Raises:
            WeightMismatchError: not `is_verified`, and a chunk does not have its digest.
            PeerLostError: a worker does not answer.
        """
        if not self._is_possible:
            return None
        manifest = fetched.manifest
        self.number += 1
        path = fetched.block.file.path
        request = StageRequest(number=self.number, path=path, tensors=manifest.tensors)
        with self._guard():
            self._tell(request.model_dump_json().encode())
            corrupt = None
            if not is_verified:
                corrupt = find_corrupt_chunk(memoryview(fetched.block.memory), manifest)
            answers = [self._answer(rank) for rank in range(self._num_workers)]
            if "never" in answers:
                self._is_possible = False
                self._tell(_NO_MORE)
        if corrupt is not None:
            raise WeightMismatchError(manifest.corruption(corrupt, "the learner's snapshot"))
        if any(answer != "staged" for answer in answers):
            return None
        return [
            (spec.name, torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta"))
            for spec in manifest.tensors
        ]

    def _tell(self, message: bytes) -> None:
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(message)
            except ConnectionError as error:
                raise _lost(rank) from error

    def _answer(self, rank: int) -> Answer:
        connection = self._connections[rank]
        try:
            if not connection.poll(_ANSWER_S):
                raise PeerLostError(
                    f"worker {rank} of the engine did not stage a version within {_ANSWER_S:g} s"
                )
            answer = connection.recv_bytes().decode()
        except (EOFError, ConnectionError) as error:
            raise _lost(rank) from error
        return next(known for known in get_args(Answer) if known == answer)

    def close(self) -> None:
        """End the workers' threads; idempotent."""
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def address_of(directory: str, rank: int) -> str:
    """Where the worker of that rank listens."""
    return str(Path(directory) / str(rank))


def _lost(rank: int) -> PeerLostError:
    return PeerLostError(
        f"worker {rank} of the engine does not stage versions any more; see this process's log"
    )
