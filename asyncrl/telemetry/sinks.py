"""Where records go: JSON lines always, Weights & Biases if asked.

The JSON-lines files of the run folder are the record; W&B is a view of it. Its client runs in a process
of its own (wandb_process.py) behind a bounded queue: a slow or dead network never slows a step nor delays
the end by more than 20 s, and rows that did not fit are counted.
"""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from asyncrl.family import die_with_parent

log = logging.getLogger(__name__)

_QUEUE_ROWS = 1000
_CLOSE_S = 20.0


class Sink(Protocol):
    """Takes one flat record a step."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Store or forward `record`; never blocks on a network."""

    def close(self) -> None:
        """Flush, within a bounded time."""


class JsonlSink:
    """One JSON object a line, flushed at once; a resumed run appends."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`; NaN and infinity are refused, since JSON has neither."""
        self._file.write(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def set_later_aside(path: Path, *, key: str, limit: int) -> int:
    """Move the records with `key` >= limit out of a JSON-lines file; how many were moved.

    A run that resumes at version `limit` makes those steps again; what an earlier attempt left of
    them goes to `<name>.set-aside`, so that the file holds one history.
    """
    if not path.exists():
        return 0
    # Bytes: only b"\n" ends a line (text has more line ends), and a kill may cut a character in two.
    with path.open("rb") as file:
        lines = list(file)
    # A line without its end was cut off by a kill; it belongs to no finished step.
    later = [not line.endswith(b"\n") or json.loads(line)[key] >= limit for line in lines]
    if any(later):
        with path.with_name(path.name + ".set-aside").open("ab") as aside:
            aside.writelines(line for line, moved in zip(lines, later, strict=True) if moved)
        kept = path.with_name(path.name + ".partial")
        kept.write_bytes(
            b"".join(line for line, moved in zip(lines, later, strict=True) if not moved)
        )
        kept.replace(path)
    return sum(later)


Histograms = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""name -> (n counts, n + 1 ascending edges)."""

Tables = Mapping[str, Sequence[Sequence[Any]]]
"""name -> a row of column names, then rows of values."""


class WandbRow(TypedDict):
    """What the client's process takes at a time."""

    values: dict[str, float | str]
    histograms: Histograms
    tables: Tables
    alerts: Sequence[tuple[str, str]]
    """(name, sentence) of each that began."""


class WandbSink:
    """Forwards records to one W&B run, through a thread and a process of their own.

    A run that is resumed under its `run_id` is the same W&B run; offline, each attempt leaves a folder
    of its own under that id.
    """

    def __init__(
        self,
        *,
        mode: Literal["online", "offline"],
        project: str,
        name: str,
        run_id: str,
        config: Mapping[str, Any],
        folder: Path,
        group: str = "",
    ) -> None:
        settings = {
            "mode": mode, "project": project, "name": name, "id": run_id, "config": dict(config),
            "dir": str(folder), "resume": "allow", "group": group or None,
        }  # fmt: skip
        self._rows: queue.Queue[WandbRow | None] = queue.Queue(_QUEUE_ROWS)
        self.num_dropped = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.telemetry.wandb_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # its messages go to stderr, the learner's log
            text=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        self._thread = threading.Thread(
            target=self._forward, args=(settings,), name="wandb", daemon=True
        )
        self._thread.start()

    def write(
        self,
        record: Mapping[str, Any],
        *,
        histograms: Histograms | None = None,
        tables: Tables | None = None,
        alerts: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Queue `record` with what goes beside it; lists in it have no curve and stay behind.

        A full queue drops it, counts it, and training goes on.
        """
        values = {name: v for name, v in record.items() if isinstance(v, float | int | str)}
        row = WandbRow(
            values=values, histograms=histograms or {}, tables=tables or {}, alerts=alerts
        )
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Let the client finish what is queued, for at most 20 s; then it is killed."""
        deadline_s = time.monotonic() + _CLOSE_S
        try:
            self._rows.put(None, timeout=1.0)
            self._process.wait(deadline_s - time.monotonic())
        except (queue.Full, subprocess.TimeoutExpired):
            log.warning("W&B is too slow: rows are left behind (metrics.jsonl has them all)")
        self._process.kill()
        self._process.wait()
        self._thread.join()
        if self.num_dropped:
            log.warning("%d rows did not reach W&B; metrics.jsonl has them all", self.num_dropped)

    def _forward(self, settings: Mapping[str, Any]) -> None:
        """The thread: it may wait for the client's pipe, which training must not."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                pipe.write(json.dumps(settings) + "\n")
                while (row := self._rows.get()) is not None:
                    pipe.write(json.dumps(row) + "\n")
                    pipe.flush()
        except OSError as error:
            log.warning("W&B is off from here on (see the log above): %s", error)
