"""The learner's side of the weight path: offers versions until they are superseded.

| thread      | does                                                                              |
|-------------|-----------------------------------------------------------------------------------|
| caller      | publish: hands a snapshot over and returns at once                                |
| digester    | digests it, retires the oldest version, serves the new one, calls on_published    |
| ChunkServer | tcp only: answers generators (server.py); with shm the file itself is read        |

Invariant: at most MAX_SERVED versions can be fetched; a version that is served is complete,
digested and constant; a buffer goes back to the pool only once nothing of it can be asked for any
more. An error of any thread is raised by the next publish() or close().
"""

import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from asyncrl.errors import ConfigError, NoProgressError, ProtocolError
from asyncrl.handover import Handover
from asyncrl.weights.buffers import (
    SHM_DIR,
    HostBuffer,
    HostBuffers,
    ShmBuffer,
    check_run_id,
    snapshot_path,
)
from asyncrl.weights.device_digests import DeviceDigester
from asyncrl.weights.digests import DigestKind, digest_chunks
from asyncrl.weights.manifest import Manifest, Probe, manifest_digest
from asyncrl.weights.server import ChunkServer
from asyncrl.weights.snapshot import Snapshot
from asyncrl.wire.messages import Announcement

MAX_SERVED = 2

_CLOSE_TIMEOUT_S = 60.0


class Publisher:
    """Offers the versions of one learner run (epoch)."""

    def __init__(
        self,
        run_id: str,
        *,
        epoch: int,
        transport: Literal["shm", "tcp"],
        on_published: Callable[[Announcement], None],
        host: str = "127.0.0.1",
        chunk_bytes: int = 4 * 2**20,
        token: str = "",
        shm_dir: Path = SHM_DIR,
        device: torch.device | None = None,
    ) -> None:
        """Start the threads; with tcp, bind a free port of `host`.

        Args:
            run_id: names the files, and is asked of every peer.
            epoch: rises with every restart of the learner.
            transport: see `choose_transport`.
            on_published: called from the digester thread once a version can be fetched.
            host: this learner's address as generators reach it (tcp).
            chunk_bytes: bytes that are digested, and with tcp sent, as one piece.
            token: key that peers must present (tcp); required unless `host` is loopback.
            shm_dir: where the files go (shm).
            device: makes the sums of the digests (shm); None: the host's cores do.

        Raises:
            ConfigError: the run id cannot name files; `host` cannot be bound, or is reachable from
                other hosts while no token is set.
        """
        self.buffers = HostBuffers(self._make_file if transport == "shm" else HostBuffer)
        self._run_id = check_run_id(run_id)
        self._epoch = epoch
        self._on_published = on_published
        self._chunk_bytes = chunk_bytes
        self._shm_dir = shm_dir
        self._device_digester = None if device is None else DeviceDigester(device)
        self._num_files = 0
        self._newest_version = -1
        self._served: dict[int, HostBuffer] = {}
        """Versions that can be fetched; only the digester touches it."""

        self._failure = Handover()
        self._server: ChunkServer | None = None
        if transport == "tcp":
            self._server = ChunkServer(
                _bind_address(host, token),
                run_id=run_id,
                epoch=epoch,
                token=token,
                failure=self._failure,
            )
        self._jobs: queue.SimpleQueue[tuple[Snapshot, bool, Probe | None] | None] = (
            queue.SimpleQueue()
        )
        # A daemon: a learner that dies of an error without close() must not hang in it.
        self._digester = threading.Thread(
            target=self._work_off, name="publisher-digester", daemon=True
        )
        self._digester.start()

    def publish(
        self, snapshot: Snapshot, *, final: bool = False, probe: Probe | None = None
    ) -> None:
        """Offer `snapshot`; its buffer belongs to the publisher from now on.

        Args:
            snapshot: taken into this publisher's `buffers`; versions must rise.
            final: no further version will follow.
            probe: what the learner says of a fixed sequence; travels in the manifest.

        Raises:
            ProtocolError: its version does not rise.
            Exception: whatever ended a thread of the publisher.
        """
        self._failure.raise_if_failed()
        if snapshot.version <= self._newest_version:
            raise ProtocolError(
                f"version {snapshot.version} is published after {self._newest_version}; "
                "versions of one epoch must rise"
            )
        self._newest_version = snapshot.version
        self._jobs.put((snapshot, final, probe))

    def close(self) -> None:
        """Publish what was handed over, then stop serving and remove every file.

        Raises:
            NoProgressError: a thread did not end in time.
            Exception: whatever ended a thread of the publisher.
        """
        self._jobs.put(None)
        self._digester.join(_CLOSE_TIMEOUT_S)
        if self._digester.is_alive():
            raise NoProgressError(f"digesting did not end within {_CLOSE_TIMEOUT_S:g} s")
        try:
            if self._server is not None:
                self._server.close()
        finally:
            self.buffers.close()
        self._failure.raise_if_failed()

    def _make_file(self, num_bytes: int) -> ShmBuffer:
        self._num_files += 1
        path = snapshot_path(self._shm_dir, self._run_id, self._epoch, self._num_files)
        return ShmBuffer(path.with_name(path.name + ".free"), num_bytes)

    def _work_off(self) -> None:
        while (job := self._jobs.get()) is not None:
            snapshot, final, probe = job
            with self._failure:
                self._offer(snapshot, final, probe)
            if snapshot.version not in self._served:
                # It failed. Whoever waits for a buffer shall get one, and then the error.
                self.buffers.give_back(snapshot.buffer)

    def _offer(self, snapshot: Snapshot, final: bool, probe: Probe | None) -> None:
        kind: DigestKind = "folded" if self._server is None else "sha256"
        manifest = Manifest(
            run_id=self._run_id,
            epoch=self._epoch,
            version=snapshot.version,
            tensors=snapshot.tensors,
            total_bytes=snapshot.buffer.num_bytes,
            chunk_bytes=self._chunk_bytes,
            digest_kind=kind,
            chunk_digests=self._digest(memoryview(snapshot.buffer.mapping), kind),
            probe=probe,
        )
        data = manifest.to_bytes()
        while len(self._served) >= MAX_SERVED:
            self._retire(min(self._served))
        endpoint = self._serve(manifest, data, snapshot.buffer)
        self._served[snapshot.version] = snapshot.buffer
        self._on_published(
            Announcement(
                epoch=self._epoch,
                version=snapshot.version,
                transport="shm" if self._server is None else "tcp",
                endpoint=endpoint,
                manifest_digest=manifest_digest(data),
                final=final,
            )
        )

    def _digest(self, memory: memoryview, kind: DigestKind) -> tuple[bytes, ...]:
        if kind == "folded" and self._device_digester is not None:
            return self._device_digester.digest_chunks(memory, self._chunk_bytes)
        return digest_chunks(memory, self._chunk_bytes, kind)

    def _serve(self, manifest: Manifest, data: bytes, buffer: HostBuffer) -> str:
        """Make a version fetchable; where."""
        if self._server is not None:
            self._server.offer(manifest, data, buffer)
            return self._server.endpoint
        assert isinstance(buffer, ShmBuffer), "a snapshot taken into another publisher's buffers"
        path = snapshot_path(self._shm_dir, self._run_id, self._epoch, manifest.version)
        buffer.serve(path, data)
        return str(path)

    def _retire(self, version: int) -> None:
        if self._server is not None:
            self._server.withdraw(version)
        self.buffers.give_back(self._served.pop(version))


def _bind_address(host: str, token: str) -> str:
    """Where the server binds: `host` as an IPv4 address, a free port."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"weights.host={host!r} is no address of this host: {error}") from error
    if not address.startswith("127.") and not token:
        raise ConfigError(
            f"weights.host={host!r} is reachable from other hosts and there is no token; "
            "name a file with a shared key in broker.token_path"
        )
    return f"tcp://{address}:*"
