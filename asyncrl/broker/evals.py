"""When the held-out evaluation runs and who runs it: one generator at a time.

Due at the first version of this epoch, then at each multiple of `every_steps` (0: never in between),
or at the next reported version if none reports that one, and at version `num_steps`. An evaluation
whose generator is lost is due again, under whatever version the next generator reports.
"""

from asyncrl.wire.messages import EvalDone


class EvalSchedule:
    """Schedule and results of one epoch."""

    def __init__(self, *, every_steps: int, num_steps: int, first_version: int) -> None:
        self._every_steps = every_steps
        self._num_steps = num_steps
        self._first_version = first_version
        self._last: int | None = None
        self._running: tuple[bytes, int] | None = None
        self._results: list[EvalDone] = []

    def is_due(self, version: int) -> bool:
        """Whether a generator that holds `version` should evaluate it now."""
        if self._running is not None or version < self._first_version:
            return False
        if self._last is None:
            return True
        if version <= self._last:
            return False
        every = self._every_steps
        return version >= self._num_steps or (every > 0 and version // every > self._last // every)

    def assign(self, generator: bytes, version: int) -> None:
        """`generator` was told to evaluate `version`."""
        self._running = (generator, version)

    def lost(self, generator: bytes) -> None:
        """`generator` is gone; what it was evaluating is due again."""
        if self._running is not None and self._running[0] == generator:
            self._running = None

    def finish(self, generator: bytes, result: EvalDone) -> bool:
        """Record a result; False (and ignored) if it is not the one that was asked for."""
        if self._running != (generator, result.version):
            return False
        self._running = None
        self._last = result.version
        self._results.append(result)
        return True

    def has_reached(self, version: int) -> bool:
        """Whether an evaluation of `version` or a later one is done."""
        return self._last is not None and self._last >= version

    def drain(self) -> list[EvalDone]:
        """Results since the previous call."""
        results, self._results = self._results, []
        return results
