"""Spans: the only place where time is measured.

Each process appends Chrome trace events to `trace/<process>.jsonl`; timestamps are CLOCK_MONOTONIC
in microseconds, which all processes of a host share, so files line up without adjustment.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Tracer:
    """Records what one process does; keeps totals for metrics and events for the trace file.

    Owned by one thread. Spans may nest; `totals` counts each span's own duration under its name.
    """

    def __init__(self, path: Path | None, *, process: str) -> None:
        """Write events to `path` (None keeps only totals), under the name `process`."""
        self._process = process
        self._file: IO[str] | None = None
        self._totals: dict[str, float] = defaultdict(float)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body under `name`, e.g. "learner/forward"."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.add(name, start_s, time.monotonic())

    def add(self, name: str, start_s: float, end_s: float) -> None:
        """Record a span measured elsewhere, in seconds of time.monotonic()."""
        self._totals[name] += end_s - start_s
        if self._file is not None:
            event = {
                "name": name,
                "ph": "X",
                "ts": round(start_s * 1e6),
                "dur": round((end_s - start_s) * 1e6),
                "pid": self._process,
                "tid": self._process,
            }
            self._file.write(json.dumps(event) + "\n")

    def totals(self) -> dict[str, float]:
        """Seconds per span name since the start."""
        return dict(self._totals)

    def close(self) -> None:
        """Flush and close the trace file."""
        if self._file is not None:
            self._file.close()
            self._file = None
