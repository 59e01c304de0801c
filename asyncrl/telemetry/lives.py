"""Reads a run's trace files: one `Life` for every time that a process of the run was started.

All times are seconds of one clock: CLOCK_MONOTONIC of the boot in which the earliest file was begun;
lives of another boot, or of another host, are moved onto it by their wall clocks. A life that was killed
ends with the last that it wrote, and lines that a kill or a full disk cut off are passed over.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


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
    with path.open("rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event["name"] == "start":
                if life is not None:
                    yield _finished(life)
                facts = event["args"]
                at_s = event["ts"] / 1e6
                life = Life(
                    process=event["pid"], kind=facts["kind"], boot=facts["boot"],
                    ahead_s=facts["ahead_s"], start_s=at_s, end_s=at_s,
                )  # fmt: skip
            elif life is not None:
                _take(life, event)
    if life is not None:
        yield _finished(life)


def _take(life: Life, event: dict[str, Any]) -> None:
    start_s = event["ts"] / 1e6
    end_s = (event["ts"] + event.get("dur", 0)) / 1e6
    life.end_s = max(life.end_s, end_s)
    if event["ph"] == "X":
        life.spans.append(Span(event["name"], start_s, end_s))
    elif event["name"] != "end":
        life.marks.append(event)


def _finished(life: Life) -> Life:
    life.spans.reverse()  # of two with the same ends the inner one was written first
    life.spans.sort(key=lambda span: (span.start_s, -span.end_s))
    return life
