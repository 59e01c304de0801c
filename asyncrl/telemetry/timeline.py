"""`asyncrl trace RUN`: all processes of a run in one file for Perfetto (ui.perfetto.dev) or Chrome.

The Trace Event Format of Chrome, as a JSON object: metadata events name processes and threads and put
them in order, then every span, mark and counter by time. Microsecond 0 is the run's first moment, on one
clock for all (lives.py). What a killed process had open is missing; it was never written.
"""

import gzip
import json
from pathlib import Path
from typing import Any

from asyncrl.telemetry.attribution import KINDS
from asyncrl.telemetry.lives import Life, read_lives


def timeline(lives: list[Life]) -> list[dict[str, Any]]:
    """Trace events: metadata first, then by `ts`, outer spans before the inner ones they begin with."""
    names = sorted({(_rank(life.kind), life.process) for life in lives})
    numbers = {process: number for number, (_, process) in enumerate(names, start=1)}
    zero_s = min((life.start_s for life in lives), default=0.0)
    metadata = [
        {"name": name, "ph": "M", "ts": 0, "pid": number, "tid": 1, "args": args}
        for process, number in numbers.items()
        for name, args in (
            ("process_name", {"name": process}),
            ("process_sort_index", {"sort_index": number}),
            ("thread_name", {"name": "main"}),
        )
    ]
    events = [event for life in lives for event in _events(life, numbers[life.process], zero_s)]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return metadata + events


def write_timeline(run_dir: Path, out: Path) -> int:
    """Write the run's timeline to `out`, gzipped if its name ends in .gz; returns the events' number.

    Raises:
        FileNotFoundError: the run has no trace.
    """
    lives = read_lives(run_dir)
    if not lives:
        raise FileNotFoundError(
            f"{run_dir}/trace holds no trace: is this the folder of a run, and was "
            "telemetry.trace=true?"
        )
    events = timeline(lives)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    data = text.encode()
    out.write_bytes(gzip.compress(data, mtime=0) if out.suffix == ".gz" else data)
    return len(events)


def _rank(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def _events(life: Life, number: int, zero_s: float) -> list[dict[str, Any]]:
    place = {"pid": number, "tid": 1}
    begun = {"name": "start", "ph": "i", "s": "p", "ts": _us(life.start_s - zero_s)} | place
    spans = [
        {
            "name": span.cause,
            "cat": life.kind,
            "ph": "X",
            "ts": (start := _us(span.start_s - zero_s)),
            "dur": _us(span.end_s - zero_s) - start,
        }
        | place
        for span in life.spans
    ]
    marks = [mark | place | {"ts": round(mark["ts"] - zero_s * 1e6)} for mark in life.marks]
    return [begun, *spans, *marks]


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
