"""The generator's side of the weight path: fetches announced versions beside the decode.

Invariant: what `ready` returns is complete and every byte matches the announced digest; until
then, and after any error, the generator keeps the weights it has. One thread fetches one version
at a time; of the announcements given meanwhile only the newest is fetched next. A version that
its publisher has retired is not an error: a newer announcement is on its way (`num_superseded`
counts them). With a `Staging` the version is copied to the engine's GPUs as well, by the
same thread; what is handed out lies there. While it works, the interpreter changes hands sooner
(switching.py).

| state of the thread | leaves it by                                                       |
|---------------------|--------------------------------------------------------------------|
| idle                | start(announcement)                                                |
| fetching            | staged; superseded -> idle; error -> idle, and ready()/wait() raise|
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from asyncrl.errors import ProtocolError
from asyncrl.handover import Handover
from asyncrl.weights.buffers import SHM_DIR, check_run_id
from asyncrl.weights.fetch import ChunkFetcher
from asyncrl.weights.fetched import Fetched
from asyncrl.weights.manifest import tensor_views
from asyncrl.weights.shared_file import MappedFile, SharedFile
from asyncrl.weights.snapshot_files import SnapshotFiles
from asyncrl.weights.staging import Staging
from asyncrl.weights.switching import quick_switches
from asyncrl.wire.messages import Announcement

_CLOSE_TIMEOUT_S = 10.0

OnDevice = list[tuple[str, torch.Tensor]]


class StagedWeights:
    """One verified version in this process's memory or on its GPU, until `release`."""

    def __init__(
        self,
        fetched: Fetched,
        *,
        on_device: OnDevice | None,
        start_s: float,
        end_s: float,
        on_release: Callable[[], None],
    ) -> None:
        self.epoch = fetched.manifest.epoch
        self.version = fetched.manifest.version
        self.num_bytes = fetched.manifest.total_bytes
        self.probe = fetched.manifest.probe
        """What the learner says of a fixed sequence, if it does."""

        self.start_s = start_s
        """When the fetch began, in seconds of time.monotonic()."""

        self.end_s = end_s
        """When it was verified and staged, same clock."""

        self._tensors: OnDevice | None = on_device
        self._block: MappedFile | None = None
        if on_device is None:
            self._block = fetched.block
            memory = memoryview(fetched.block.memory)
            self._tensors = list(tensor_views(memory, fetched.manifest.tensors))
        self._specs = fetched.manifest.tensors
        self._on_release = on_release

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) of every tensor, in the manifest's order; views, valid until `release`.

        Raises:
            ValueError: the weights were released.
        """
        if self._tensors is None:
            raise ValueError(f"the weights of version {self.version} were released")
        return iter(self._tensors)

    @property
    def file(self) -> SharedFile | None:
        """The same tensors for other processes, until `release`; None if they are on the GPU."""
        return SharedFile(self._block.file.path, self._specs) if self._block else None

    def release(self) -> None:
        """Give the memory back; idempotent."""
        if self._tensors is not None:
            self._tensors = self._block = None
            self._on_release()


class Subscriber:
    """Fetches the versions of one run; methods are called from one thread, `start` from any other."""

    def __init__(
        self,
        run_id: str,
        *,
        chunks_in_flight: int = 8,
        timeout_s: float = 60.0,
        max_total_bytes: int = 2**38,
        token: str = "",
        shm_dir: Path = SHM_DIR,
        staging: Staging | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Nothing is fetched before the first `start`.

        Args:
            run_id: versions of other runs are refused.
            chunks_in_flight: chunks asked for at a time (tcp).
            timeout_s: an answer that takes longer is an error (tcp).
            max_total_bytes: larger versions are refused before any memory is taken.
            token: key to present (tcp).
            shm_dir: the only directory that files are read from (shm).
            staging: the way to the engine's GPUs; None leaves weights in host memory.
            on_change: called from the thread when a fetch has ended, well or not.

        Raises:
            ConfigError: the run id cannot name files.
        """
        self._files = SnapshotFiles(
            check_run_id(run_id), shm_dir=shm_dir, max_total_bytes=max_total_bytes
        )
        self._staging = staging
        self._fetcher = ChunkFetcher(
            run_id,
            token=token,
            chunks_in_flight=chunks_in_flight,
            timeout_s=timeout_s,
            max_total_bytes=max_total_bytes,
        )
        self.num_superseded = 0
        """Versions that were gone before they were fetched, or dropped by `prefer_newest`."""

        self._on_change = on_change
        self._changed = threading.Condition()
        self._failure = Handover()
        self._newest = (-1, -1)
        self._retryable = False
        self._target: Announcement | None = None
        self._busy = False
        self._closing = False
        self._staged: StagedWeights | None = None
        self._num_held = 0
        self._thread: threading.Thread | None = None

    def start(self, announcement: Announcement) -> None:
        """Fetch this version next; returns at once. The same again is a no-op unless it failed.

        Raises:
            ProtocolError: it is older than one that was given before.
        """
        name = (announcement.epoch, announcement.version)
        with self._changed:
            if name < self._newest:
                raise ProtocolError(
                    f"(epoch, version) {name} was announced after {self._newest}; names must rise"
                )
            if name == self._newest and not self._retryable:
                return
            self._newest = name
            self._retryable = False
            self._target = announcement
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="subscriber", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def ready(self, newest: tuple[int, int] | None = None) -> StagedWeights | None:
        """The version that is complete, once; None while there is none. Never blocks.

        Args:
            newest: (epoch, version); what is newer waits for a later call.

        Raises:
            PeerLostError: the publisher did not answer in time.
            WeightMismatchError: digests, sizes or names do not fit; nothing was staged.
            ProtocolError: the publisher refused, or the announcement names another place or run.
        """
        with self._changed:
            self._failure.raise_if_failed(forget=True)
            staged = self._staged
            if staged is None or (newest and (staged.epoch, staged.version) > newest):
                return None
            self._staged = None
            return staged

    @property
    def is_fetching(self) -> bool:
        """Whether a newer version is on its way, or waits for its turn."""
        with self._changed:
            return self._busy or self._target is not None

    def prefer_newest(self) -> None:
        """Drop what is ready if a newer version waits for its place; for whom cannot adopt now.

        Who can must not call it: versions that come faster than they are fetched would all be dropped.
        """
        with self._changed:
            if self._staged is not None and self._target is not None:
                self._staged.release()
                self._staged = None
                self.num_superseded += 1

    def wait(self, timeout_s: float) -> StagedWeights | None:
        """`ready`, waiting up to `timeout_s`; None at once when nothing is being fetched."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (self._staged or self._failure.failed) and (self._busy or self._target):
                if not self._changed.wait(deadline - time.monotonic()):
                    break
        return self.ready()

    def close(self) -> None:
        """Stop fetching; weights that were handed out stay valid."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._fetcher.stop()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        try:
            while (announcement := self._next_target()) is not None:
                outcome = Handover()
                with outcome, quick_switches:
                    self._stage(announcement)
                self._finish(outcome)
        finally:
            self._fetcher.close()
            self._files.close()

    def _next_target(self) -> Announcement | None:
        with self._changed:
            self._changed.wait_for(self._can_go_on)
            target, self._target = self._target, None
            self._busy = True
            return None if self._closing else target

    def _can_go_on(self) -> bool:
        # tcp and the GPU have one buffer: it is free once the version in it was released.
        target = self._target
        is_mapped = target is not None and target.transport == "shm" and self._staging is None
        return self._closing or is_mapped or (target is not None and self._num_held == 0)

    def _stage(self, announcement: Announcement) -> None:
        start_s = time.monotonic()
        fetched, on_device = self._fetch(announcement)
        with self._changed:
            if fetched is None:
                self.num_superseded += 1
                return
            if self._staged is not None:  # never handed out
                self._staged.release()
            self._num_held += 1
            self._staged = StagedWeights(
                fetched,
                on_device=on_device,
                start_s=start_s,
                end_s=time.monotonic(),
                on_release=self._on_release,
            )

    def _fetch(self, announcement: Announcement) -> tuple[Fetched | None, OnDevice | None]:
        """A version in host memory, and its tensors on the device if there is a way and room."""
        if announcement.transport == "tcp":
            fetched = self._fetcher.fetch(announcement)
            if fetched is None or self._staging is None:
                return fetched, None
            return fetched, self._staging.upload(fetched, is_verified=True)
        if self._staging is not None:
            with self._files.shared(announcement) as fetched:
                if fetched is None:
                    return None, None
                on_device = self._staging.upload(fetched, is_verified=False)
                if on_device is not None:
                    return fetched, on_device
        return self._files.private(announcement), None

    def _finish(self, outcome: Handover) -> None:
        # One step under the lock: who sees the error may start the same version again at once.
        with self._changed:
            self._busy = False
            if outcome.failed:
                self._failure = outcome
                self._retryable = self._target is None
            self._changed.notify_all()
        if self._on_change is not None:
            self._on_change()

    def _on_release(self) -> None:
        with self._changed:
            self._num_held -= 1
            self._changed.notify_all()
