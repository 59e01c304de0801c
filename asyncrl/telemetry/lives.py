"""Reads a run's trace files: one `Life` for every time that a process of the run was started.

All times are seconds of one clock: CLOCK_MONOTONIC of the boot in which the earliest file was begun;
lives of another boot, or of another host, are moved onto it by their wall clocks. A life that was killed
ends with the last that it wrote; lines that a kill or a full disk cut off, and events that are not of
the form of trace.py, are passed over.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.telemetry.jsonlines import Record, number, read_lines, tree


class Span(NamedTuple):
    """Seconds in which a process did one thing; `name` is "<kind>/<cause>"."""

    name: str
    start_s: float
    end_s: float

    @property
    def cause(self) -> str:
        """What it did."""
        return self.name.rpartition("/")[2]


@dataclass(slots=True, kw_only=True)
class Life:
    """One process from its start to its end."""

    process: str
    kind: str
    boot: str
    ahead_s: float
    """Wall clock minus the clock of this life's times."""

    start_s: float
    end_s: float
    spans: list[Span] = field(default_factory=list)
    """By start; of several that start together the outer comes first."""

    marks: list[dict[str, Any]] = field(default_factory=list)
    """Instants and counters as they are in the file, but for `ts`, which is microseconds of the
    common clock."""

    def shift(self, by_s: float) -> None:
        """Move every time."""
        self.start_s += by_s
        self.end_s += by_s
        self.ahead_s -= by_s
        self.spans = [Span(s.name, s.start_s + by_s, s.end_s + by_s) for s in self.spans]
        for mark in self.marks:
            mark["ts"] += by_s * 1e6


def read_lives(run_dir: Path) -> list[Life]:
    """Every life in `run_dir`/trace, by start; [] if the run wrote no trace (telemetry.trace=false)."""
    lives = [life for path in sorted((run_dir / "trace").glob("*.jsonl")) for life in _read(path)]
    if not lives:
        return []
    # Wall clocks order lives of several boots, which their own clocks cannot.
    lives.sort(key=lambda life: life.start_s + life.ahead_s)
    first = lives[0]
    for life in lives:
        if life.boot != first.boot:
            life.shift(life.ahead_s - first.ahead_s)
    return sorted(lives, key=lambda life: life.start_s)


def _read(path: Path) -> Iterator[Life]:
    life: Life | None = None
    for event in read_lines(path):
        name, at, length = event.get("name"), number(event.get("ts")), number(event.get("dur", 0))
        if not isinstance(name, str) or at is None or length is None or length < 0:
            continue
        start_s, end_s = at / 1e6, (at + length) / 1e6
        if name == "start":
            if (begun := _begun(event, start_s)) is not None:
                if life is not None:
                    yield _finished(life)
                life = begun
        elif life is not None:
            life.end_s = max(life.end_s, end_s)
            if event.get("ph") == "X":
                life.spans.append(Span(name, start_s, end_s))
            elif name != "end":
                life.marks.append(_mark(event))
    if life is not None:
        yield _finished(life)


def _begun(event: Record, at_s: float) -> Life | None:
    facts, process = event.get("args"), event.get("pid")
    if not isinstance(facts, dict) or not isinstance(process, str):
        return None
    kind, boot, ahead_s = facts.get("kind"), facts.get("boot"), number(facts.get("ahead_s"))
    if not isinstance(kind, str) or not isinstance(boot, str) or ahead_s is None:
        return None
    return Life(
        process=process, kind=kind, boot=boot, ahead_s=ahead_s, start_s=at_s, end_s=at_s
    )  # fmt: skip


def _mark(event: Record) -> Record:
    mark: Record = tree(event)
    if not isinstance(mark.get("args", {}), dict):
        del mark["args"]
    return mark


def _finished(life: Life) -> Life:
    life.spans.reverse()  # of two with the same ends the inner one was written first
    life.spans.sort(key=lambda span: (span.start_s, -span.end_s))
    return life
