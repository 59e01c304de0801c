"""How much generators and learner really worked at the same time, from a run's trace files."""

import json
from collections.abc import Iterable
from pathlib import Path

Interval = tuple[float, float]
"""(start, end) in seconds of the host's monotonic clock."""

LEARNER_BUSY = ("learner/build", "learner/forward", "learner/backward", "learner/optimizer")
GENERATOR_BUSY = ("generator/decode",)


def busy_intervals(trace: Path, names: Iterable[str]) -> list[Interval]:
    """Merged, ascending intervals in which any span of `names` was open."""
    wanted = set(names)
    found = []
    for line in trace.read_text().splitlines():
        event = json.loads(line)
        if event["name"] in wanted:
            start_s = event["ts"] / 1e6
            found.append((start_s, start_s + event["dur"] / 1e6))
    return merge(found)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def overlap_s(left: list[Interval], right: list[Interval]) -> float:
    """Seconds in which both unions were open; both must be merged and ascending."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        start_s = max(left[i][0], right[j][0])
        end_s = min(left[i][1], right[j][1])
        total += max(0.0, end_s - start_s)
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def run_overlap(run_dir: Path) -> dict[str, float]:
    """Busy seconds of learner and of all generators together, and the seconds both were busy.

    Empty if the run wrote no trace of one side (telemetry.trace=false, or it ended too early).
    """
    learner_trace = run_dir / "trace" / "learner.jsonl"
    traces = sorted(path for path in (run_dir / "trace").glob("*.jsonl") if path != learner_trace)
    if not learner_trace.exists() or not traces:
        return {}
    learner = busy_intervals(learner_trace, LEARNER_BUSY)
    generators = merge(i for trace in traces for i in busy_intervals(trace, GENERATOR_BUSY))
    return {
        "learner_busy_s": round(sum(end - start for start, end in learner), 3),
        "generators_busy_s": round(sum(end - start for start, end in generators), 3),
        "both_busy_s": round(overlap_s(learner, generators), 3),
    }
