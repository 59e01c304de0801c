"""Gets one announced version into this process's memory over a network: chunk by chunk (tcp).

Invariant: what is returned matches the announced manifest digest and every chunk digest, and was
published by this run under the announced name. Claimed sizes are checked before memory is taken. None
means that the publisher has retired the version.

WantManifest, then up to `chunks_in_flight` WantChunk at a time; chunks come in any order. A chunk with
a wrong digest is asked for once more.
"""

import mmap
import re
import threading
import time
from collections import deque

from asyncrl.errors import PeerLostError, ProtocolError, WeightMismatchError
from asyncrl.weights.digests import digest
from asyncrl.weights.fetched import Fetched, read_manifest
from asyncrl.weights.manifest import MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES, Manifest
from asyncrl.weights.shared_file import MappedFile, memory_file
from asyncrl.wire import messages
from asyncrl.wire.channel import Channel, Envelope
from asyncrl.wire.messages import Announcement

_MAX_MESSAGE_BYTES = max(MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES) + 2**16
_STOP_CHECK_S = 0.2
_ENDPOINT = re.compile(r"tcp://[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}")


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
        self._buffer: MappedFile | None = None

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
        if self._buffer is None or len(self._buffer.memory) != manifest.total_bytes:
            self._buffer = memory_file(manifest.total_bytes)
        if not self._pull_chunks(channel, announcement, manifest, self._buffer.memory):
            return None
        return Fetched(manifest, self._buffer)

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
