"""drops.jsonl: every group that left untrained, why, and of some what had been sampled.

A finished group that is filtered (zero_signal) never reaches the learner, so its text would be lost. Its
payload, which the broker does not read, is kept as it came, in base64, for the first few of each version.
"""

import base64
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from asyncrl.broker.journal import Drop, DropReason, NullJournal
from asyncrl.telemetry.jsonlines import read_lines
from asyncrl.telemetry.sinks import JsonlSink, set_later_aside

MAX_PAYLOAD_BYTES = 2**20
"""Larger payloads are left out: a line is written while peers wait."""


class DropLog(NullJournal):
    """A journal that remembers drops only."""

    def __init__(self, path: Path, *, num_payloads: int) -> None:
        """Append to `path`; the payloads of the first `num_payloads` groups a version are kept."""
        self._path = path
        self._num_payloads = num_payloads
        self._sink = JsonlSink(path)
        self._version, self._num_kept = -1, 0

    def opened(self, *, epoch: int, version: int, cursor: int) -> Counter[DropReason]:
        """What an earlier attempt dropped in steps that are made again moves aside; the rest counts."""
        self._sink.close()
        set_later_aside(self._path, key="version", limit=version)
        dropped: Counter[DropReason] = Counter(line["reason"] for line in read_lines(self._path))
        self._sink = JsonlSink(self._path)
        return dropped

    def dropped(self, drop: Drop) -> None:
        """One line."""
        line: dict[str, Any] = {
            "group_id": drop.start.group_id, "ordinal": drop.start.ordinal,
            "attempt": drop.start.attempt, "version": drop.version, "reason": drop.reason,
            "again": drop.again, "generator": drop.holder, 
            # JSON has no NaN, which a scorer of another version may send.
            "scores": [s if s is not None and math.isfinite(s) else None for s in drop.scores],
            "time": round(time.time(), 3),
        }  # fmt: skip
        if drop.version != self._version:
            self._version, self._num_kept = drop.version, 0
        size = sum(memoryview(frame).nbytes for frame in drop.frames)
        if 0 < size <= MAX_PAYLOAD_BYTES and self._num_kept < self._num_payloads:
            self._num_kept += 1
            line["payload"] = [base64.b64encode(frame).decode() for frame in drop.frames]
        self._sink.write(line)

    def close(self) -> None:
        """Close the file."""
        self._sink.close()
