"""Spans: the only place where time is measured; what a process writes to its trace file.

A span is named "<kind>/<cause>", kind being the sort of process: learner, generator, scorer, broker.
`Tracer.totals` is exclusive: every second of the process's life belongs to the innermost span that was
open, or to "<kind>/other", so that

    sum of totals = now - the life's start, at any moment, spans that are still open included.

Each process appends Chrome trace events to `trace/<process>.jsonl`, one a line: an instant "start" and
"end" around its life, "X" for a span once it is over (its own duration, nested ones included), "i" and
"C" for marks and counters. `ts` is CLOCK_MONOTONIC in microseconds, which all processes of a host share;
"start" also says the boot and the wall clock, by which timeline.py and attribution.py bring files of
several hosts, or of a run that was resumed after a reboot, onto one clock.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class _Row:
    """Spans of one name in a row that are not written yet."""

    name: str
    depth: int
    start_s: float
    sum_s: float
    num_spans: int = 1


class Tracer:
    """Records what one process does; keeps totals for metrics and events for the trace file.

    Owned by one thread. Spans may nest.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        process: str,
        kind: str = "",
        since_s: float | None = None,
        grain_s: float = 0.0,
    ) -> None:
        """Begin a life of `process`.

        Args:
            path: where events go; None keeps only totals.
            process: its name, unique in the run.
            kind: the sort of process; by default the same as `process`.
            since_s: when the life began, if before now, in seconds of time.monotonic(); the time from
                then to `joined` is a span "<kind>/start".
            grain_s: of spans of one name in a row those that begin within this time go to the file as
                one, of their summed length and with their number, at the place of the first: a file
                grows by the second then, not by the decode step. Sums stay exact.
        """
        now_s = time.monotonic()
        self._process = process
        self._kind = kind or process
        self._grain_s = grain_s
        self._row: _Row | None = None
        self._file: IO[str] | None = None
        self._open = [f"{self._kind}/{'other' if since_s is None else 'start'}"]
        self._start_s = self._charged_s = now_s if since_s is None else since_s
        self._totals: dict[str, float] = {self._open[0]: 0.0}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)
            if self._file.tell():
                self._file.write("\n")  # the life before may have been cut off within a line
        values = {"kind": self._kind, "boot": _boot(), "ahead_s": time.time() - now_s}
        self._event("start", "i", self._start_s, args=values)

    def joined(self) -> None:
        """Starting up ends here; not to be called within a span."""
        now_s = time.monotonic()
        self._charge(now_s)
        self._write_span(self._open[0], self._start_s, now_s)
        self._open[0] = f"{self._kind}/other"

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body under `name`, e.g. "learner/forward"."""
        start_s = time.monotonic()
        self._charge(start_s)
        self._open.append(name)
        try:
            yield
        finally:
            end_s = time.monotonic()
            self._charge(end_s)
            self._open.pop()
            self._gather(name, start_s, end_s)

    def add(self, name: str, start_s: float, end_s: float, *, within: str = "") -> None:
        """Record a span that is over by now and was measured elsewhere, in time.monotonic().

        Its time is taken from the span that is open, which must be as old; if that is not `within`,
        nothing is recorded.
        """
        if within and self._open[-1] != within:
            return
        self._charge(time.monotonic())
        self._totals[self._open[-1]] -= end_s - start_s
        self._totals[name] = self._totals.get(name, 0.0) + end_s - start_s
        self._gather(name, start_s, end_s)

    def mark(self, name: str, **values: float | str) -> None:
        """Record a moment."""
        self._event(name, "i", time.monotonic(), args=values)

    def count(self, name: str, **values: float) -> None:
        """Record the present values of a counter; each becomes a curve."""
        self._event(name, "C", time.monotonic(), args=values)

    def totals(self) -> dict[str, float]:
        """Exclusive seconds by span name since the life's start, "<kind>/other" included."""
        self._charge(time.monotonic())
        return dict(self._totals)

    def close(self) -> None:
        """End the life and close the trace file; idempotent."""
        if self._file is not None:
            self._flush()
            self._event("end", "i", time.monotonic())
            self._file.close()
            self._file = None

    def _charge(self, now_s: float) -> None:
        """Give the time since the last call to the innermost open span."""
        name = self._open[-1]
        self._totals[name] = self._totals.get(name, 0.0) + now_s - self._charged_s
        self._charged_s = now_s

    def _gather(self, name: str, start_s: float, end_s: float) -> None:
        """A span is over: it joins the row before it, or begins the next one."""
        row, depth = self._row, len(self._open)
        same = row is not None and (row.name, row.depth) == (name, depth)
        if row is not None and same and start_s - row.start_s < self._grain_s:
            row.sum_s += end_s - start_s
            row.num_spans += 1
            return
        self._flush()
        self._row = _Row(name, depth, start_s, end_s - start_s)
        if not self._grain_s:
            self._flush()

    def _flush(self) -> None:
        if self._row is not None:
            row, self._row = self._row, None
            self._write_span(row.name, row.start_s, row.start_s + row.sum_s, row.num_spans)

    def _write_span(self, name: str, start_s: float, end_s: float, num_spans: int = 1) -> None:
        # Both ends are rounded, not the length: spans that touch or nest still do so in the file.
        dur = round(end_s * 1e6) - round(start_s * 1e6)
        args = {"spans": num_spans} if num_spans > 1 else None
        self._event(name, "X", start_s, dur=dur, args=args)

    def _event(
        self,
        name: str,
        phase: str,
        at_s: float,
        *,
        dur: int | None = None,
        args: Mapping[str, object] | None = None,
    ) -> None:
        if self._file is None:
            return
        event: dict[str, object] = {"name": name, "ph": phase, "ts": round(at_s * 1e6)}
        if dur is not None:
            event["dur"] = dur
        event |= {"pid": self._process, "tid": self._process}
        if phase == "i":
            event["s"] = "p"
        if args is not None:
            event["args"] = args
        self._file.write(json.dumps(event) + "\n")


def process_start_s() -> float:
    """When this process was started, in seconds of time.monotonic(), to 0.01 s."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    age_s = up_s - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age_s)


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
