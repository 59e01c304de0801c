"""What Linux offers so that no process of a run outlives it.

| who               | asks the kernel for                                                          |
|-------------------|------------------------------------------------------------------------------|
| every child       | SIGKILL when its parent dies (PR_SET_PDEATHSIG), before its first instruction |
| a keeper          | SIGTERM instead: it cleans up first (keeper.py)                              |
| the supervisor    | to inherit what its children leave behind (PR_SET_CHILD_SUBREAPER)           |

The second is for processes that a user's scorer started: their scoring process dies with its generator,
and they would live on under init. Elsewhere than on Linux these calls do nothing.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Set
from pathlib import Path

from asyncrl.errors import AsyncRLError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Be killed when process `parent`, which started this one, ends, even by SIGKILL; or get `number`.

    Raises:
        AsyncRLError: it has ended already.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        raise AsyncRLError("the parent process ended while this one started")


def inherit_orphans(on: bool = True) -> None:
    """Become the parent of descendants whose own parent ends; or no longer."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def children(parent: int) -> set[int]:
    """Process ids of the living and not yet reaped children of process `parent`."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            after_name = status.read_text(errors="replace").rpartition(")")[2].split()
            if int(after_name[1]) == parent:
                found.add(int(status.parent.name))
    return found


def kill_orphans(kept: Set[int], *, timeout_s: float = 2.0) -> set[int]:
    """Kill and reap all children of this process but `kept`; those that are still there in the end."""
    deadline_s = time.monotonic() + timeout_s
    # The children of an orphan become ours when it ends, and are found in the next turn.
    while orphans := children(os.getpid()) - kept:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline_s:
            return orphans
        time.sleep(0.01)
    return set()


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value) != 0:
        raise AsyncRLError(f"prctl({option}): {os.strerror(ctypes.get_errno())}")
