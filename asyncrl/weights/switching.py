"""The interpreter changes hands sooner while a thread with little to do is waited for.

Python lets the running thread go on for sys.getswitchinterval(), 5 ms, before another one gets the
interpreter. A thread that lets go of it in each of a few short calls, beside a loop that never does,
waits as long for it every time. A short interval takes the loop some of its time, so it lasts no longer
than such work, and the process has its own interval before and after.
"""

import sys
import threading
from types import TracebackType

INTERVAL_S = 0.0002
"""While anybody is in the context; half a dozen waits of this length are little beside a decode step."""


class QuickSwitches:
    """A context that threads enter and leave in any order, each as often as it likes.

    The interval is a process's only one, so there is one object: `quick_switches`.
    """

    def __init__(self) -> None:
        """Nobody is in the context."""
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._before_s = sys.getswitchinterval()
                _set(min(self._before_s, INTERVAL_S))
            self._num_inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                _set(self._before_s)


def _set(interval_s: float) -> None:
    # Python cuts off what is no whole microsecond: of 99 us, read as a float, it would make 98.
    sys.setswitchinterval(interval_s + 0.5e-6)


quick_switches = QuickSwitches()
