"""Carries an error out of a worker thread to the caller that must know of it.

Used as a context manager around the thread's work: whatever ends the work is kept, and the next
`raise_if_failed` raises it in the caller's thread. So no failure of a thread passes unseen.
"""

from types import TracebackType
from typing import Self


class Handover:
    """One slot for an error; written by the worker, raised by the caller."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is not None:
            self._error = error
        return error is not None

    @property
    def failed(self) -> bool:
        """Whether an error waits to be raised."""
        return self._error is not None

    def raise_if_failed(self, *, forget: bool = False) -> None:
        """Raise the kept error; `forget` makes room for going on after it."""
        error = self._error
        if error is not None:
            if forget:
                self._error = None
            raise error
