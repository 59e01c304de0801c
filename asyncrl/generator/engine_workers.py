"""The processes that an engine starts beside its own (vLLM with engine.tensor_parallel_size > 1).

vLLM notices that a worker has died, stops the others and breaks off what was asked of them; what comes
out of the call then is whatever that broke: RuntimeError("cancelled"), an AssertionError, a lost
connection.

Invariant: such an end is a PeerLostError that names the process, however vLLM words it; an error while
all workers live is left as it is.
"""

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from asyncrl.errors import PeerLostError

_NOTICE_S = 5.0
"""A dying process closes its connections before it can be waited for."""

_ERRORS = (RuntimeError, AssertionError, OSError, EOFError, AttributeError)
"""What vLLM 0.26 to 0.33 was seen to raise, and its like; TimeoutError is an OSError."""


class EngineWorkers:
    """Child processes started while the block ran."""

    def __init__(self) -> None:
        """Take note of those that are there already; they are not the engine's."""
        self._others = set(multiprocessing.active_children())
        self._processes: list[BaseProcess] = []
        self.are_lost = False
        """Whether a guarded call has failed for the death of one."""

    def started(self) -> None:
        """Call once the engine stands: its workers are what came since."""
        found = set(multiprocessing.active_children()) - self._others
        self._processes = sorted(found, key=lambda process: process.name)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around a call into the engine.

        Raises:
            PeerLostError: it failed, and a worker has died.
        """
        try:
            yield
        except _ERRORS as error:
            lost = self._lost()
            if not lost:
                raise
            self.are_lost = True
            raise PeerLostError(
                f"a worker process of the engine has died: {', '.join(lost)}; the engine ends with it "
                f"({type(error).__name__}: {error}); see this process's log and the host's for a lack of "
                "memory"
            ) from error

    def _lost(self) -> list[str]:
        """Those that have ended, killed ones first: the others may only have been told to stop."""
        sentinels = [process.sentinel for process in self._processes]
        ended = set(connection.wait(sentinels, timeout=_NOTICE_S)) if sentinels else set()
        dead = [process for process in self._processes if process.sentinel in ended]
        for process in dead:
            process.join(_NOTICE_S)  # its end is seen a moment before its exit code
        dead.sort(key=lambda process: process.exitcode in (0, -signal.SIGTERM))
        return [f"{process.name} (pid {process.pid}, {_how(process)})" for process in dead]


def _how(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None:
        return "ended"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
