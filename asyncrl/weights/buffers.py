"""Host memory that snapshots are written to: anonymous (tcp), or a mapped file in /dev/shm (shm).

Invariant: bytes that anyone may still be reading are never written. At most MAX_BUFFERS exist:
two that are served and one that is written next; a served buffer comes back only through
`give_back`.

A shm buffer IS the file that generators map, so there is no second copy. Its name tells its
state:

    asyncrl-<run>-<epoch>-<n>.free             being written, or waiting; the writer holds flock EX
    asyncrl-<run>-<epoch>-<version>            served; every reader holds flock SH while it maps it
    asyncrl-<run>-<epoch>-<version>.manifest   its manifest

Withdrawing renames the file away first and then tries EX. Got: nobody maps it, and its pages are
used again (fresh pages cost more than the copy itself). Refused: the file is deleted, the readers
keep their mapping, and a new file is made. A reader that opened the old name too late fails its
SH, or finds that the name no longer leads to the file it opened (flock(2), rename(2)). No torch
here: the supervisor imports this module to clean up after a crash.
"""

import fcntl
import logging
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from asyncrl.errors import ConfigError, NoProgressError

MAX_BUFFERS = 3
SHM_DIR = Path("/dev/shm")

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_log = logging.getLogger(__name__)


def check_run_id(run_id: str) -> str:
    """The run id itself.

    Raises:
        ConfigError: it is not 1 to 64 letters, digits, "_" and "-", so it cannot name files.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"run id {run_id!r} cannot name files; expected 1 to 64 letters, digits, '_' and '-'"
        )
    return run_id


def snapshot_path(shm_dir: Path, run_id: str, epoch: int, version: int) -> Path:
    """The file that serves (epoch, version) of a run."""
    return shm_dir / f"asyncrl-{check_run_id(run_id)}-{epoch:d}-{version:d}"


def manifest_path(snapshot: Path) -> Path:
    """The file beside a snapshot that holds its manifest."""
    return snapshot.with_name(snapshot.name + ".manifest")


class HostBuffer:
    """One block of anonymous host memory, page-aligned and zeroed."""

    def __init__(self, num_bytes: int, *, mapping: mmap.mmap | None = None) -> None:
        self.num_bytes = num_bytes
        if mapping is None:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            mapping = mmap.mmap(-1, num_bytes, flags=private | mmap.MAP_POPULATE)
        self.mapping = mapping

    def withdraw(self) -> bool:
        """Stop serving; whether the memory may be written again."""
        return True

    def delete(self) -> None:
        """Give up the memory; mappings and views that others hold stay valid."""


class ShmBuffer(HostBuffer):
    """A file in shared memory, exclusively created, mode 0600, mapped by the writer."""

    def __init__(self, free_path: Path, num_bytes: int) -> None:
        """Create and map the file; all pages are reserved, so a full /dev/shm is an error here.

        Raises:
            FileExistsError: another live run, or leftovers of a crashed one, use the name.
            OSError: no room.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(free_path, flags, 0o600)
        self._free_path = self._path = free_path
        try:
            # Without this, writing to a full tmpfs through a mapping ends in SIGBUS.
            os.posix_fallocate(self._fd, 0, num_bytes)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
            super().__init__(num_bytes, mapping=mmap.mmap(self._fd, num_bytes, flags=shared))
        except OSError:
            self.delete()
            raise

    def serve(self, path: Path, manifest: bytes) -> None:
        """Let readers in under the name `path`, the manifest beside it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        # link, not rename: rename would silently replace a file that another run put there.
        os.link(self._path, path)
        self._path.unlink()
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(manifest_path(path), flags, 0o600), "wb") as file:
            file.write(manifest)

    def withdraw(self) -> bool:
        """Take the name away; True once no reader maps the file (it is locked for writing then)."""
        if self._path != self._free_path:
            manifest_path(self._path).unlink(missing_ok=True)
            self._path.rename(self._free_path)
            self._path = self._free_path
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def delete(self) -> None:
        """Remove the file; readers keep their mapping."""
        if self._fd >= 0:
            manifest_path(self._path).unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class HostBuffers:
    """The buffers of one publisher; safe to use from its threads and the learner's."""

    def __init__(self, make: Callable[[int], HostBuffer]) -> None:
        """Buffers of n bytes come from `make(n)`."""
        self._make = make
        self._changed = threading.Condition()
        self._free: list[HostBuffer] = []
        self._lent: set[HostBuffer] = set()
        self._closed = False

    def prepare(self, num_bytes: int) -> list[HostBuffer]:
        """Make all buffers now: fresh pages cost several times as much as the copy into them."""
        with self._changed:
            while len(self._free) + len(self._lent) < MAX_BUFFERS:
                self._free.append(self._make(num_bytes))
            return list(self._free)

    def acquire(self, num_bytes: int, *, timeout_s: float = 60.0) -> HostBuffer:
        """A buffer that nobody reads.

        Raises:
            NoProgressError: all are still served or digested after `timeout_s`.
            ValueError: closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._closed:
                raise ValueError("the publisher of these buffers is closed")
            while not self._free and len(self._lent) >= MAX_BUFFERS:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise NoProgressError(
                        f"all {MAX_BUFFERS} snapshot buffers were in use for {timeout_s:g} s: "
                        "versions are published faster than they are digested"
                    )
            buffer = self._free.pop() if self._free else self._make(num_bytes)
            self._lent.add(buffer)
            return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Stop serving `buffer`; its memory is used again unless a reader still maps it."""
        with self._changed:
            self._lent.discard(buffer)
            if buffer.withdraw():
                self._free.append(buffer)
            else:
                buffer.delete()
            self._changed.notify_all()

    def close(self) -> None:
        """Delete every buffer and its files; none is made any more."""
        with self._changed:
            self._closed = True
            for buffer in [*self._free, *self._lent]:
                buffer.delete()
            self._free.clear()
            self._lent.clear()


def choose_transport(
    setting: Literal["auto", "shm", "tcp"],
    *,
    is_local: bool,
    snapshot_bytes: int,
    shm_dir: Path = SHM_DIR,
) -> Literal["shm", "tcp"]:
    """What weights travel by: shm needs all generators on this host and room for every buffer.

    Raises:
        ConfigError: shm was asked for and cannot work.
    """
    if setting == "tcp":
        return "tcp"
    needed = MAX_BUFFERS * snapshot_bytes
    if not is_local:
        obstacle = "generators may be on other hosts (broker.address is not loopback)"
    elif not shm_dir.is_dir():
        obstacle = f"{shm_dir} does not exist"
    elif (room := _free_bytes(shm_dir)) < needed:
        obstacle = f"{shm_dir} has {room} bytes free, {MAX_BUFFERS} snapshots need {needed}"
    else:
        _log.info("weights travel by shm: this host only, %d bytes fit into %s", needed, shm_dir)
        return "shm"
    if setting == "shm":
        raise ConfigError(f"weights.transport='shm' cannot work: {obstacle}; set it to 'tcp'")
    _log.info("weights travel by tcp: %s", obstacle)
    return "tcp"


def _free_bytes(directory: Path) -> int:
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


def remove_leftovers(run_id: str, *, shm_dir: Path = SHM_DIR) -> list[str]:
    """Delete what a killed learner of this run left in shared memory; the names deleted.

    Only call it when no learner of the run is alive.
    """
    pattern = re.compile(rf"asyncrl-{re.escape(check_run_id(run_id))}-\d+-\d+(\.manifest|\.free)?")
    removed = []
    for path in sorted(shm_dir.glob("asyncrl-*")):
        facts = path.lstat()
        is_ours = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
        if pattern.fullmatch(path.name) and is_ours:
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
