"""The reader's side of shared memory: the files in which a publisher on this host serves versions.

Files are opened only under the name that this run would give them. A file is locked for reading (flock)
as long as anybody may read it; the publisher writes to none that is locked. None means that the version
was retired: a newer announcement is on its way.

| who reads          | how it is mapped                                | checked           | locked      |
|--------------------|-------------------------------------------------|-------------------|-------------|
| an engine, in host | copy-on-write, for this version only            | here              | until the   |
| memory             |                                                 |                   | views are   |
|                    |                                                 |                   | gone        |
| a GPU's copy engine| shared, and kept: the publisher writes versions | by who copies, in | until the   |
|                    | to the same few files, so each is mapped and    | the copy          | copy is     |
|                    | pinned once (pinning.py); never written here    |                   | made        |
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import ProtocolError, WeightMismatchError
from asyncrl.weights.buffers import manifest_path, snapshot_path
from asyncrl.weights.fetched import Fetched, read_manifest
from asyncrl.weights.manifest import MAX_MANIFEST_BYTES, Manifest, find_corrupt_chunk
from asyncrl.weights.shared_file import MappedFile, OpenFile
from asyncrl.wire.messages import Announcement


class SnapshotFiles:
    """The files of one run in one directory; used from one thread."""

    def __init__(self, run_id: str, *, shm_dir: Path, max_total_bytes: int) -> None:
        """No file is opened yet."""
        self._run_id = run_id
        self._shm_dir = shm_dir
        self._max_total_bytes = max_total_bytes
        self._kept: dict[tuple[int, int], MappedFile] = {}

    def private(self, announcement: Announcement) -> Fetched | None:
        """A verified version, copy-on-write, locked until the last reference to its block is gone.

        Raises:
            ProtocolError: the announced path is not where this run serves that version.
            WeightMismatchError: the file or its manifest is not what was announced.
        """
        found = self._open(announcement, os.O_RDONLY)
        if found is None:
            return None
        manifest, file = found
        # mmap keeps a duplicate of the descriptor, and so the lock.
        fetched = Fetched(manifest, MappedFile(file, manifest.total_bytes, "private"))
        corrupt = find_corrupt_chunk(memoryview(fetched.block.memory), manifest)
        if corrupt is not None:
            raise WeightMismatchError(manifest.corruption(corrupt, announcement.endpoint))
        return fetched

    @contextmanager
    def shared(self, announcement: Announcement) -> Iterator[Fetched | None]:
        """A version that is not verified yet, locked until the end of the `with`.

        Raises:
            ProtocolError: the announced path is not where this run serves that version.
            WeightMismatchError: the file or its manifest is not what was announced.
        """
        self._forget_deleted()
        found = self._open(announcement, os.O_RDWR)  # pages to be pinned must be writable
        if found is None:
            yield None
            return
        manifest, file = found
        block = self._kept.get(file.identity)
        if block is None:
            block = self._kept[file.identity] = MappedFile(file, manifest.total_bytes, "shared")
        try:
            yield Fetched(manifest, block)
        finally:
            file.unlock()

    def close(self) -> None:
        """Unmap what is kept."""
        self._kept.clear()

    def _forget_deleted(self) -> None:
        """Files that the publisher will not write to again."""
        self._kept = {key: block for key, block in self._kept.items() if block.file.has_name}

    def _open(self, announcement: Announcement, access: int) -> tuple[Manifest, OpenFile] | None:
        """The announced version's manifest, and its file, locked for reading."""
        path = snapshot_path(self._shm_dir, self._run_id, announcement.epoch, announcement.version)
        if announcement.endpoint != str(path):
            raise ProtocolError(
                f"announced is the file {announcement.endpoint!r}, expected {str(path)!r}"
            )
        try:
            with os.fdopen(_open(manifest_path(path), os.O_RDONLY), "rb") as manifest_file:
                data = manifest_file.read(MAX_MANIFEST_BYTES + 1)
            manifest = read_manifest(
                data, announcement, run_id=self._run_id, max_total_bytes=self._max_total_bytes
            )
            file = OpenFile(_open(path, access))
        except FileNotFoundError:
            return None
        if not lock_for_reading(file.fd, path):
            return None
        size = os.fstat(file.fd).st_size
        if size != manifest.total_bytes:
            raise WeightMismatchError(
                f"{path} has {size} bytes, its manifest says {manifest.total_bytes}"
            )
        return manifest, file


def _open(path: Path, access: int) -> int:
    """Open a regular file of this user; no symbolic link is followed."""
    fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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
