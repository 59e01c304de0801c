"""A worker's end of shard_staging.py: its part of every version, beside the model in use."""

import logging
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
from pydantic import TypeAdapter

from asyncrl.errors import WeightMismatchError
from asyncrl.generator.copy_plan import CopyPlan
from asyncrl.generator.shard_staging import (
    NO_MORE,
    DigestAnswer,
    DigestRequest,
    Readiness,
    StageAnswer,
    StageRequest,
)
from asyncrl.generator.vllm_direct import DirectLoader
from asyncrl.weights.device_digests import DeviceDigester
from asyncrl.weights.digests import digest_chunks
from asyncrl.weights.manifest import tensor_views
from asyncrl.weights.pinning import Pins
from asyncrl.weights.shared_file import MappedFile, OpenFile
from asyncrl.weights.switching import quick_switches

log = logging.getLogger(__name__)

_CONNECT_S = 60.0

_REQUEST: TypeAdapter[StageRequest | DigestRequest] = TypeAdapter(StageRequest | DigestRequest)


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
        is_cuda = device.type == "cuda"
        self._pins = Pins() if is_cuda else None
        self._digester = DeviceDigester(device) if is_cuda else None
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
            while (message := connection.recv_bytes()) != NO_MORE:
                request = _REQUEST.validate_json(message)
                answer: StageAnswer | DigestAnswer
                with quick_switches:
                    if isinstance(request, StageRequest):
                        answer = StageAnswer(readiness=self._stage(request))
                    else:
                        answer = DigestAnswer(digests=self._digest(request))
                connection.send_bytes(answer.model_dump_json().encode())
            self._number, self._shard, self._files, self._digester = 0, None, {}, None

    def _stage(self, request: StageRequest) -> Readiness:
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

    def _digest(self, request: DigestRequest) -> tuple[str, ...]:
        """Of the chunks that this worker is asked for, on its device if that has room."""
        if request.start == request.end:
            return ()
        chunks = memoryview(self._mapped(request.path).memory)[request.start : request.end]
        if self._digester is not None and request.digest_kind == "folded":
            digests = self._digester.digest_chunks(chunks, request.chunk_bytes)
        else:
            digests = digest_chunks(chunks, request.chunk_bytes, request.digest_kind)
        return tuple(each.hex() for each in digests)

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
