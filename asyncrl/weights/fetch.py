"""Gets one announced version into this process's memory: mapped (shm) or chunk by chunk (tcp).

Invariant: what is returned matches the announced manifest digest and every chunk digest, and was
published by this run under the announced name. Claimed sizes are checked before memory is taken;
files are opened only under the name that this run would give them. None means that the publisher
has retired the version.

tcp: WantManifest, then up to `chunks_in_flight` WantChunk at a time; chunks come in any order. A
chunk with a wrong digest is asked for once more.
"""

import fcntl
import mmap
import os
import re
import stat
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import PeerLostError, ProtocolError, WeightMismatchError
from asyncrl.weights.buffers import manifest_path, snapshot_path
from asyncrl.weights.manifest import (
    MAX_CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Buffer,
    Manifest,
    digest,
    find_corrupt_chunk,
)
from asyncrl.weights.shared_file import OpenFile, memory_file
from asyncrl.wire import messages
from asyncrl.wire.channel import Channel, Envelope
from asyncrl.wire.messages import Announcement

_MAX_MESSAGE_BYTES = max(MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES) + 2**16
_STOP_CHECK_S = 0.2
_ENDPOINT = re.compile(r"tcp://[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified version; `memory`, which shows `file`, may be written, which nobody else sees."""

    manifest: Manifest
    memory: mmap.mmap
    file: OpenFile


def read_manifest(
    data: Buffer, announcement: Announcement, *, run_id: str, max_total_bytes: int
) -> Manifest:
    """The manifest in `data`, which is that of the announced version of this run.

    Raises:
        WeightMismatchError: see Manifest.from_bytes; or it is of another run, epoch or version.
    """
    manifest = Manifest.from_bytes(
        data, expected_digest=announcement.manifest_digest, max_total_bytes=max_total_bytes
    )
    got = (manifest.run_id, manifest.epoch, manifest.version)
    expected = (run_id, announcement.epoch, announcement.version)
    if got != expected:
        raise WeightMismatchError(f"the manifest is of {got}, announced was {expected}")
    return manifest


def map_snapshot(
    announcement: Announcement, *, run_id: str, shm_dir: Path, max_total_bytes: int
) -> Fetched | None:
    """Map the file of an shm announcement, copy-on-write, and verify it; None if it is gone.

    The file is locked for reading until the last reference to it, to the mapping and to the views of
    that is gone; so the publisher does not write these pages again before.

    Raises:
        ProtocolError: the announced path is not where this run serves that version.
        WeightMismatchError: the file or its manifest is not what was announced.
    """
    path = snapshot_path(shm_dir, run_id, announcement.epoch, announcement.version)
    if announcement.endpoint != str(path):
        raise ProtocolError(
            f"announced is the file {announcement.endpoint!r}, expected {str(path)!r}"
        )
    try:
        manifest_fd = _open(manifest_path(path))
        with os.fdopen(manifest_fd, "rb") as manifest_file:
            data = manifest_file.read(MAX_MANIFEST_BYTES + 1)
        manifest = read_manifest(data, announcement, run_id=run_id, max_total_bytes=max_total_bytes)
        file = OpenFile(_open(path))
    except FileNotFoundError:
        return None
    if not lock_for_reading(file.fd, path):
        return None
    size = os.fstat(file.fd).st_size
    if size != manifest.total_bytes:
        raise WeightMismatchError(
            f"{path} has {size} bytes, its manifest says {manifest.total_bytes}"
        )
    # mmap keeps a duplicate of fd, and so the lock. MAP_PRIVATE: the file is never changed.
    memory = mmap.mmap(file.fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    corrupt = find_corrupt_chunk(memoryview(memory), manifest)
    if corrupt is not None:
        raise WeightMismatchError(
            f"version {manifest.version}: chunk {corrupt} of {manifest.num_chunks} in {path} does "
            "not have the digest that its manifest gives"
        )
    return Fetched(manifest, memory, file)


def _open(path: Path) -> int:
    """Open a regular file of this user for reading; no symbolic link is followed."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        os.close(fd)
        raise WeightMismatchError(f"{path} is not a regular file of this user")
    return fd


def lock_for_reading(fd: int, path: Path) -> bool:
    """Keep the writer off the file; False if it has taken the file's name away already."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        named, opened = path.stat(follow_symlinks=False), os.fstat(fd)
    except (BlockingIOError, FileNotFoundError):
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


class ChunkFetcher:
    """Fetches over ZeroMQ; used from one thread, except `stop`."""

    def __init__(
        self,
        run_id: str,
        *,
        token: str,
        chunks_in_flight: int,
        timeout_s: float,
        max_total_bytes: int,
    ) -> None:
        self._run_id = run_id
        self._token = token
        self._chunks_in_flight = chunks_in_flight
        self._timeout_s = timeout_s
        self._max_total_bytes = max_total_bytes
        self._stopping = threading.Event()
        self._channel: Channel | None = None
        self._endpoint = ""
        self._buffer: tuple[mmap.mmap, OpenFile] | None = None

    def stop(self) -> None:
        """Make a fetch that is under way return None soon; callable from any thread."""
        self._stopping.set()

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def fetch(self, announcement: Announcement) -> Fetched | None:
        """The announced version; None if it is gone. Its memory is written again by the next call.

        Raises:
            PeerLostError: an answer did not come within the timeout.
            ProtocolError: no tcp address, or the publisher refused or broke the protocol.
            WeightMismatchError: manifest or chunk do not have their digest, or claim too much.
        """
        channel = self._connect(announcement.endpoint)
        done = False
        try:
            fetched = self._fetch(channel, announcement)
            done = True
        finally:
            if not done:  # answers may still be under way; the next fetch shall not meet them
                self.close()
        return fetched

    def _connect(self, endpoint: str) -> Channel:
        if not _ENDPOINT.fullmatch(endpoint):
            raise ProtocolError(f"announced is {endpoint!r}, expected tcp://HOST:PORT")
        if self._channel is None or endpoint != self._endpoint:
            self.close()
            self._channel = Channel(endpoint, max_message_bytes=_MAX_MESSAGE_BYTES)
            self._endpoint = endpoint
        return self._channel

    def _fetch(self, channel: Channel, announcement: Announcement) -> Fetched | None:
        channel.send(
            messages.WantManifest(
                run_id=self._run_id,
                token=self._token,
                epoch=announcement.epoch,
                version=announcement.version,
            )
        )
        deadline = time.monotonic() + self._timeout_s
        answer = self._receive(channel, announcement, deadline, "its manifest")
        if answer is None:
            return None
        if not isinstance(answer.message, messages.Manifest):
            raise ProtocolError(f"asked for a manifest, got {answer.message.kind!r}")
        manifest = read_manifest(
            answer.frames[0],
            announcement,
            run_id=self._run_id,
            max_total_bytes=self._max_total_bytes,
        )
        if manifest.digest_kind != "sha256":
            raise WeightMismatchError(
                f"version {manifest.version} has {manifest.digest_kind} digests; what comes over a "
                "network must have sha256"
            )
        if self._buffer is None or len(self._buffer[0]) != manifest.total_bytes:
            self._buffer = memory_file(manifest.total_bytes)
        if not self._pull_chunks(channel, announcement, manifest, self._buffer[0]):
            return None
        return Fetched(manifest, *self._buffer)

    def _pull_chunks(
        self, channel: Channel, announcement: Announcement, manifest: Manifest, memory: mmap.mmap
    ) -> bool:
        """Fill `memory`; False if the version went away meanwhile."""
        waiting, suspect = deque(range(manifest.num_chunks)), set[int]()
        deadlines: dict[int, float] = {}  # of the chunks in flight, oldest first
        while waiting or deadlines:
            while waiting and len(deadlines) < self._chunks_in_flight:
                index = waiting.popleft()
                self._ask_chunk(channel, announcement, index)
                deadlines[index] = time.monotonic() + self._timeout_s
            oldest, deadline = next(iter(deadlines.items()))
            awaited = f"chunk {oldest} of {manifest.num_chunks}"
            answer = self._receive(channel, announcement, deadline, awaited)
            if answer is None:
                return False
            chunk = answer.message
            if not isinstance(chunk, messages.Chunk) or chunk.index not in deadlines:
                raise ProtocolError(f"got {chunk!r}, which was not asked for")
            del deadlines[chunk.index]
            start, end = manifest.chunk_range(chunk.index)
            frame = answer.frames[0]
            expected = manifest.chunk_digests[chunk.index]
            is_right = len(frame) == end - start and digest(frame, manifest.digest_kind) == expected
            if is_right:
                memory[start:end] = frame
            elif chunk.index in suspect:
                raise WeightMismatchError(
                    f"version {manifest.version}: chunk {chunk.index} of {manifest.num_chunks} "
                    f"from {self._endpoint} twice did not have its digest"
                )
            else:
                suspect.add(chunk.index)
                waiting.appendleft(chunk.index)
        return True

    def _ask_chunk(self, channel: Channel, announcement: Announcement, index: int) -> None:
        channel.send(
            messages.WantChunk(
                run_id=self._run_id,
                token=self._token,
                epoch=announcement.epoch,
                version=announcement.version,
                index=index,
            )
        )

    def _receive(
        self, channel: Channel, announcement: Announcement, deadline: float, awaited: str
    ) -> Envelope | None:
        """The next answer about this version; None if that is Gone, or once stopped."""
        name = (announcement.epoch, announcement.version)
        while not self._stopping.is_set():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise PeerLostError(
                    f"version {announcement.version}: {awaited} did not come from "
                    f"{self._endpoint} within {self._timeout_s:g} s; the learner is gone or the "
                    "network too slow (weights.timeout_s)"
                )
            answer = channel.receive(min(remaining_s, _STOP_CHECK_S))
            if answer is None:
                continue
            match answer.message:
                case messages.Refuse(reason=reason):
                    raise ProtocolError(f"the publisher at {self._endpoint} refused: {reason}")
                case messages.Gone(epoch=epoch, version=version) if (epoch, version) == name:
                    return None
                case messages.Manifest() | messages.Chunk() as message:
                    if (message.epoch, message.version) == name:
                        return answer
                case messages.Gone():  # of a version that was given up earlier
                    continue
                case other:
                    raise ProtocolError(f"a publisher does not send {other.kind!r}")
        return None
