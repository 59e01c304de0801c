"""Answers generators that fetch weights over ZeroMQ; one thread owns the Listener.

| asked                        | answered                                                          |
|------------------------------|-------------------------------------------------------------------|
| WantManifest                 | Manifest + its bytes, or Gone                                     |
| WantChunk                    | Chunk + its bytes, or Gone                                        |
| foreign run, wrong token,    | Refuse with the reason: a newer version would be refused as well  |
| no such chunk, anything else |                                                                   |

Invariant: once `withdraw` has returned, no byte of that version leaves any more: a chunk is
copied out of the buffer under the same lock, so the buffer may then be written. Every byte is
asked for; a slow generator slows only itself.
"""

import hmac
import threading
from dataclasses import dataclass

from asyncrl.errors import NoProgressError
from asyncrl.handover import Handover
from asyncrl.weights.buffers import HostBuffer
from asyncrl.weights.manifest import MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES, Manifest
from asyncrl.wire import messages
from asyncrl.wire.channel import Envelope, Listener, Malformed

_MAX_MESSAGE_BYTES = max(MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES) + 2**16
_STOP_CHECK_S = 0.2
_START_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Served:
    manifest: Manifest
    manifest_bytes: bytes
    buffer: HostBuffer


class ChunkServer:
    """Serves the versions it was given, to peers of one run that know the token."""

    def __init__(
        self, address: str, *, run_id: str, epoch: int, token: str, failure: Handover
    ) -> None:
        """Bind `address` ("tcp://IP:*") in a thread of its own, whose error goes to `failure`.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._run_id = run_id
        self._epoch = epoch
        self._token = token.encode()
        self._failure = failure
        self._lock = threading.Lock()
        self._served: dict[int, _Served] = {}
        self._stopping = threading.Event()
        self._bound = threading.Event()
        self.endpoint = ""
        # A daemon: a learner that dies of an error without close() must not hang in it.
        self._thread = threading.Thread(
            target=self._serve, args=(address,), name="chunk-server", daemon=True
        )
        self._thread.start()
        if not self._bound.wait(_START_TIMEOUT_S):
            raise NoProgressError(f"{address} was not bound within {_START_TIMEOUT_S:g} s")
        failure.raise_if_failed()

    def offer(self, manifest: Manifest, manifest_bytes: bytes, buffer: HostBuffer) -> None:
        """Serve a version; `buffer` stays constant until it is withdrawn."""
        with self._lock:
            self._served[manifest.version] = _Served(manifest, manifest_bytes, buffer)

    def withdraw(self, version: int) -> None:
        """Answer Gone for `version` from now on."""
        with self._lock:
            self._served.pop(version, None)

    def close(self) -> None:
        """Stop answering.

        Raises:
            NoProgressError: the thread did not end in time.
        """
        self._stopping.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise NoProgressError(f"the chunk server did not end within {_CLOSE_TIMEOUT_S:g} s")

    def _serve(self, address: str) -> None:
        with self._failure:
            try:
                listener = Listener(address, max_message_bytes=_MAX_MESSAGE_BYTES)
                self.endpoint = listener.endpoint
            finally:
                self._bound.set()
            try:
                while not self._stopping.is_set():
                    asked = listener.receive(_STOP_CHECK_S)
                    if asked is not None:
                        # False: the asker is gone, and nobody misses the answer.
                        listener.send(asked.sender, *self._answer(asked))
            finally:
                listener.close()

    def _answer(self, asked: Envelope | Malformed) -> tuple[messages.Message, list[bytes]]:
        if isinstance(asked, Malformed):
            return messages.Refuse(reason=asked.reason), []
        want = asked.message
        if not isinstance(want, messages.WantManifest | messages.WantChunk):
            return messages.Refuse(reason=f"a publisher does not answer {want.kind!r}"), []
        if want.run_id != self._run_id:
            reason = f"run {want.run_id!r} asked the publisher of run {self._run_id!r}"
            return messages.Refuse(reason=reason), []
        if not hmac.compare_digest(want.token.encode(), self._token):
            return messages.Refuse(reason="wrong token; see broker.token_path on both sides"), []
        with self._lock:
            served = self._served.get(want.version) if want.epoch == self._epoch else None
            if served is None:
                held = [(self._epoch, version) for version in sorted(self._served)]
                reason = f"({want.epoch}, {want.version}) is not held; held are {held}"
                gone = messages.Gone(epoch=want.epoch, version=want.version, reason=reason)
                return gone, []
            return self._pick(want, served)

    def _pick(
        self, want: messages.WantManifest | messages.WantChunk, served: _Served
    ) -> tuple[messages.Message, list[bytes]]:
        if isinstance(want, messages.WantManifest):
            answer = messages.Manifest(epoch=want.epoch, version=want.version)
            return answer, [served.manifest_bytes]
        if want.index >= served.manifest.num_chunks:
            reason = f"chunk {want.index} of {served.manifest.num_chunks}"
            return messages.Refuse(reason=reason), []
        start, end = served.manifest.chunk_range(want.index)
        chunk = messages.Chunk(epoch=want.epoch, version=want.version, index=want.index)
        return chunk, [served.buffer.mapping[start:end]]
