"""A bell that any thread rings and one sleeper hears, also among other file descriptors.

Invariant: a ring after the last `quiet` is heard by the next wait, however long before it was rung; so
who quiets the bell first and looks for news then misses none.
"""

import contextlib
import socket


class Bell:
    """Readable (`fileno`) from the first ring until `quiet`."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        """For select: readable while the bell rings."""
        return self._near.fileno()

    def ring(self) -> None:
        """From any thread; rings of a bell that rings already, or is closed, are as good as one."""
        with contextlib.suppress(OSError):
            self._far.send(b"\0")

    def quiet(self) -> None:
        """Stop ringing."""
        with contextlib.suppress(BlockingIOError):
            while self._near.recv(4096):
                pass

    def close(self) -> None:
        """Give the file descriptors back."""
        self._near.close()
        self._far.close()
