"""Files that hold tensors and that this user's other processes can map: an engine's own workers.

Linux only: a file is named by its descriptor in the process that has it open, so it can be mapped also
after its name was taken away (shm: the publisher renames it), or if it never had one (tcp: memfd).
"""

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Literal

from asyncrl.weights.manifest import TensorSpec


class OpenFile:
    """A descriptor, closed with the last reference to this object; a lock on it goes then too."""

    def __init__(self, fd: int) -> None:
        """Take over `fd`."""
        self.fd = fd

    def __del__(self) -> None:
        """Close it."""
        os.close(self.fd)

    @property
    def path(self) -> str:
        """Where processes of this user find it, as long as this object lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode: what tells files apart while they are open."""
        facts = os.fstat(self.fd)
        return facts.st_dev, facts.st_ino

    @property
    def has_name(self) -> bool:
        """Whether any directory still lists it."""
        return os.fstat(self.fd).st_nlink > 0

    def unlock(self) -> None:
        """Give up a lock (flock) on it, also while it is mapped."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)


class MappedFile:
    """An open file in this process's memory, whole."""

    def __init__(
        self, file: OpenFile, num_bytes: int, sharing: Literal["shared", "private"]
    ) -> None:
        """Map it; "private": what is written to the memory is seen by nobody else.

        No page is fetched yet: mmap would stop every thread of this process for all of them. Who copies
        or pins the memory fetches them, and lets the other threads run.
        """
        flags = mmap.MAP_PRIVATE if sharing == "private" else mmap.MAP_SHARED
        self.file = file
        self.memory = mmap.mmap(
            file.fd, num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Tensors in a file, for other processes to map."""

    path: str
    tensors: tuple[TensorSpec, ...]


def memory_file(num_bytes: int) -> MappedFile:
    """Zeroed memory that is a file without a name.

    Raises:
        OSError: no room.
    """
    file = OpenFile(os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC))
    os.posix_fallocate(file.fd, 0, num_bytes)
    return MappedFile(file, num_bytes, "shared")
