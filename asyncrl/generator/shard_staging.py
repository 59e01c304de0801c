"""A version's parts on the devices of an engine with several workers, brought there beside the decode.

    generator's process (ShardedStaging)           every worker (ShardServer, a thread)
    {number, path, tensors}      -- a socket -->   maps the file, once for all versions written to it
                                 <-- "staged" --   copies its part to memory beside the model's own
    {path, start, end}           -- if all have -> digests its share of the file's chunks
    compares the digests         <-- digests --
    ... the engine is paused     "load_staged" ->  one device copy into the parameters

What a worker's part is follows from the copies that its own loader made (copy_plan.py), so there is
none before the first version was adopted, and none if the trial of vllm_direct.py failed: then, and
if a device has no room, a version is adopted from its file while the engine is paused.

Invariant: a worker's part is written only while nobody waits to adopt it: the subscriber stages a
version only after the one before was released; and what is adopted has the number that was staged.
Digests are made once all workers have copied: what was written over meanwhile has another one by then.
If one worker can never stage, the others give back what they have taken for it; after an error on the
way to one nothing is staged any more, as answers might be taken for those of another version. The
workers' end is shard_server.py.
"""

import os
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from asyncrl.errors import PeerLostError, WeightMismatchError
from asyncrl.handover import Handover
from asyncrl.weights.digests import DigestKind
from asyncrl.weights.fetched import Fetched
from asyncrl.weights.manifest import DTYPES, Manifest, TensorSpec, first_difference

_ANSWER_S = 120.0
"""Pinning a file for the first time takes a second for some GB."""

_MAX_TEMP = 60
"""Bytes of a folder's name; an address of a socket has at most 107."""

Readiness = Literal["staged", "not yet", "never"]
"""Of a worker. Never: the trial has failed, or the device has no room."""

NO_MORE = b""
"""Instead of a request: nothing will be staged; what was taken for it is given back."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StageRequest(_Message):
    """What every worker is asked first: JSON, as all that follows on the socket."""

    number: int = Field(ge=1)
    """Rises with every version that is offered."""

    path: str
    """Of the file that holds the tensors."""

    tensors: tuple[TensorSpec, ...] = Field(strict=False)


class StageAnswer(_Message):
    """What a worker says to it."""

    readiness: Readiness


class DigestRequest(_Message):
    """What a worker is asked once all of them have staged."""

    path: str

    start: int
    end: int
    """The bytes of the file, whole chunks, that this worker digests; none if they are equal."""

    chunk_bytes: int
    digest_kind: DigestKind


class DigestAnswer(_Message):
    """What a worker says to it."""

    digests: tuple[str, ...] = Field(strict=False)
    """Of the chunks that it was asked for, in hex."""


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
        self._failure = Handover()
        self._is_possible = True

    @property
    def directory(self) -> str:
        """Worker i listens at `address_of(directory, i)`."""
        return self._folder.name

    def connect(self) -> None:
        """Once all of them listen; the folder is not needed any more then."""
        for rank in range(self._num_workers):
            connection = Client(address_of(self.directory, rank), family="AF_UNIX")
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                deadline = struct.pack("ll", *divmod(int(_ANSWER_S * 1e6), 10**6))
                for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                    same.setsockopt(socket.SOL_SOCKET, option, deadline)
            self._connections.append(connection)
        self._folder.cleanup()

    def upload(
        self, fetched: Fetched, *, is_verified: bool
    ) -> list[tuple[str, torch.Tensor]] | None:
        """Have every worker copy its part; the version's tensors without values, on device "meta".

        None if a worker cannot: the weights are then adopted from host memory.

        Raises:
            WeightMismatchError: not `is_verified`, and a chunk does not have its digest.
            PeerLostError: a worker does not answer, or has not answered before.
        """
        if not self._is_possible:
            return None
        manifest = fetched.manifest
        with self._guard():
            digests = None
            if not self._failure.failed:
                with self._failure:
                    digests = self._bring(fetched, is_verified=is_verified)
            self._failure.raise_if_failed()
        if digests is None:
            return None
        if not is_verified and (corrupt := first_difference(digests, manifest)) is not None:
            raise WeightMismatchError(manifest.corruption(corrupt, "the learner's snapshot"))
        return [
            (spec.name, torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta"))
            for spec in manifest.tensors
        ]

    def _bring(self, fetched: Fetched, *, is_verified: bool) -> list[bytes] | None:
        """Have a version copied, and digested if it is not verified; None if a worker has no copy."""
        self.number += 1
        path, manifest = fetched.block.file.path, fetched.manifest
        request = StageRequest(number=self.number, path=path, tensors=manifest.tensors)
        answers = [
            StageAnswer.model_validate_json(answer).readiness
            for answer in self._ask([_dumped(request)] * self._num_workers)
        ]
        if "never" in answers:
            self._is_possible = False
            for rank in range(self._num_workers):
                self._tell(rank, NO_MORE)
        if any(answer != "staged" for answer in answers):
            return None
        requests = [] if is_verified else [
            _dumped(DigestRequest(
                path=path, start=start, end=end, chunk_bytes=manifest.chunk_bytes,
                digest_kind=manifest.digest_kind,
            ))
            for start, end in self._shares(manifest)
        ]  # fmt: skip
        found = [DigestAnswer.model_validate_json(answer) for answer in self._ask(requests)]
        return [bytes.fromhex(each) for answer in found for each in answer.digests]

    def _shares(self, manifest: Manifest) -> list[tuple[int, int]]:
        """The bytes that each worker digests: all chunks once."""
        counts = range(self._num_workers + 1)
        firsts = [manifest.num_chunks * rank // self._num_workers for rank in counts]
        ends = [min(first * manifest.chunk_bytes, manifest.total_bytes) for first in firsts]
        return list(pairwise(ends))

    def _ask(self, requests: Sequence[bytes]) -> list[bytes]:
        """What the first workers answer, one to each request."""
        for rank, request in enumerate(requests):
            self._tell(rank, request)
        return [self._answer(rank) for rank in range(len(requests))]

    def _tell(self, rank: int, message: bytes) -> None:
        try:
            self._connections[rank].send_bytes(message)
        except BlockingIOError as error:  # its buffer was full until the deadline
            raise _too_late(rank) from error
        except OSError as error:
            raise _lost(rank) from error

    def _answer(self, rank: int) -> bytes:
        try:
            return self._connections[rank].recv_bytes()
        except BlockingIOError as error:  # nothing came until the deadline
            raise _too_late(rank) from error
        except (EOFError, OSError) as error:
            raise _lost(rank) from error

    def close(self) -> None:
        """End the workers' threads; idempotent."""
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def address_of(directory: str, rank: int) -> str:
    """Where the worker of that rank listens."""
    return str(Path(directory) / str(rank))


def _dumped(request: StageRequest | DigestRequest) -> bytes:
    return request.model_dump_json().encode()


def _lost(rank: int) -> PeerLostError:
    return PeerLostError(
        f"worker {rank} of the engine does not stage versions any more; see this process's log"
    )


def _too_late(rank: int) -> PeerLostError:
    return PeerLostError(
        f"worker {rank} of the engine did not stage a version within {_ANSWER_S:g} s"
    )
