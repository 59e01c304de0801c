"""Files that hold tensors and that this user's other processes can map: an engine's own workers.

Linux only: a file is named by its descriptor in the process that has it open, so it can be mapped also
after its name was taken away (shm: the publisher renames it), or if it never had one (tcp: memfd).
"""

import mmap
import os
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Tensors in a file, for other processes to map."""

    path: str
    tensors: tuple[TensorSpec, ...]


def memory_file(num_bytes: int) -> tuple[mmap.mmap, OpenFile]:
    """Zeroed memory that is a file without a name, mapped here.

    Raises:
        OSError: no room.
    """
    file = OpenFile(os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC))
    os.posix_fallocate(file.fd, 0, num_bytes)
    return mmap.mmap(file.fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), file
