"""Seconds by cause over time and by step, for the page's stacked bars (telemetry/attribution.py).

A step's window is what the learner's rank 0 did between the records of two steps, checkpoint included:
that of time/step_s in metrics.jsonl. Of a step that was made again it is the last time, so a resumed run
has the windows of its surviving history. Times are seconds since the run's first moment.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from asyncrl.telemetry.attribution import (
    KINDS,
    Interval,
    exclusive,
    kind_shares,
    merge,
    training_window,
)
from asyncrl.telemetry.bottleneck import Split, diagnose
from asyncrl.telemetry.lives import Life

Causes = dict[str, float]
"""cause -> seconds."""

NUM_BINS = 240


def spread(lives: Iterable[Life], windows: Sequence[Interval]) -> list[Causes]:
    """Seconds of all these lives together in each window; windows ascend and do not overlap.

    What a scoring process does without a name is nothing, so it is called idle.
    """
    found: list[Causes] = [defaultdict(float) for _ in windows]
    for life in lives:
        at = 0
        rest = "idle" if life.kind == "scorer" else "other"
        for piece in exclusive(life):
            while at < len(windows) and windows[at][1] <= piece.start_s:
                at += 1
            inside = at
            while inside < len(windows) and windows[inside][0] < piece.end_s:
                start_s, end_s = windows[inside]
                seconds = min(end_s, piece.end_s) - max(start_s, piece.start_s)
                if seconds > 0:
                    found[inside][piece.cause if piece.cause != "other" else rest] += seconds
                inside += 1
    return [dict(causes) for causes in found]


def step_windows(lives: Iterable[Life]) -> dict[int, Interval]:
    """By step: (start, end) of its making."""
    windows: dict[int, Interval] = {}
    for life in lives:  # by start: a later attempt replaces the steps that it made again
        made = _made(life) if life.process == "learner" else {}
        first = min(made, default=0)
        if made:
            windows = {step: when for step, when in windows.items() if step < first} | made
    return windows


def _made(life: Life) -> dict[int, Interval]:
    """The steps of one life of the learner.

    Traces of earlier releases have no mark "step": there a step ends with its publication, before its
    checkpoint and its record.
    """
    ends = list(_marks(life, "step"))
    begins = [span.end_s for span in life.spans if span.cause == "start"] if ends else []
    waits = [span.start_s for span in life.spans if span.cause == "wait_batch"]
    reached_s = min(begins or waits, default=life.start_s)
    made: dict[int, Interval] = {}
    for version, at_s in ends or _marks(life, "version"):
        if version > 0 and at_s > reached_s:
            made[version - 1] = (reached_s, at_s)
            reached_s = at_s
    return made


def _marks(life: Life, name: str) -> Iterator[tuple[int, float]]:
    """The version and the moment of each mark of this name."""
    for mark in life.marks:
        version = mark.get("args", {}).get("version")
        if mark["name"] == name and isinstance(version, int):
            yield version, mark["ts"] / 1e6


def causes_by_step(lives: Sequence[Life]) -> dict[int, dict[str, Causes]]:
    """By step: kind -> cause -> seconds; {} without a trace."""
    windows = step_windows(lives)
    ordered = sorted(windows, key=lambda step: windows[step])
    found: dict[int, dict[str, Causes]] = {step: {} for step in ordered}
    for kind in ("learner", "generator", "scorer"):
        chosen = [life for life in lives if life.kind == kind]
        if kind == "learner":  # the other ranks wait for the first one
            chosen = [life for life in chosen if life.process == "learner"]
        parts = spread(chosen, [windows[step] for step in ordered])
        for step, causes in zip(ordered, parts, strict=True):
            if causes:
                found[step][kind] = causes
    return found


def strips(
    lives: Sequence[Life], split: Split | None, alerts: Collection[str] = ()
) -> dict[str, Any]:
    """Each process in equal bins over the run and over its training, the steps' ends, who waits.

    `alerts` are the names of those that were on in any step.
    """
    if not lives:
        return {}
    zero_s = min(life.start_s for life in lives)
    whole = (zero_s, max(life.end_s for life in lives))
    training = training_window(lives)
    kinds = {life.process: life.kind for life in lives}
    names = sorted(kinds, key=lambda name: (_rank(kinds[name]), name))
    views = {"the whole run": whole} | ({"training": training} if training is not None else {})
    return {
        "processes": [{"name": name, "kind": kinds[name]} for name in names],
        "views": [
            {
                "name": view,
                "start": round(window[0] - zero_s, 3),
                "seconds": round(window[1] - window[0], 3),
                "bins": [
                    _bins([li for li in lives if li.process == name], window) for name in names
                ],
            }
            for view, window in views.items()
        ],
        "steps": [
            [step, round(start - zero_s, 3), round(end - zero_s, 3)]
            for step, (start, end) in sorted(step_windows(lives).items())
        ],
        **_whole(lives, training or whole, split, alerts),
    }


def _rank(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def _bins(lives: Sequence[Life], window: Interval) -> list[Causes]:
    """Shares of each bin by cause."""
    width_s = max(window[1] - window[0], 1e-6) / NUM_BINS
    edges = [window[0] + i * width_s for i in range(NUM_BINS + 1)]
    parts = spread(lives, list(pairwise(edges)))
    return [{cause: round(s / width_s, 4) for cause, s in part.items()} for part in parts]


def meanwhile_by_step(lives: Sequence[Life]) -> dict[int, Causes]:
    """By step: what generators did while the learner had no batch, as `_meanwhile` says it."""
    windows = step_windows(lives)
    ordered = sorted(windows, key=lambda step: windows[step])
    found = _meanwhile(lives, [windows[step] for step in ordered])
    return dict(zip(ordered, found, strict=True))


def _meanwhile(lives: Sequence[Life], windows: Sequence[Interval]) -> list[Causes]:
    """In each window, shares of the generators' time while the learner had no batch, start-up left out.

    {} if it had one all the time. Windows ascend and do not overlap.
    """
    waits = merge(
        (piece.start_s, piece.end_s)
        for life in lives
        if life.kind == "learner"
        for piece in exclusive(life)
        if piece.cause == "wait_batch"
    )
    inside = list(_within(waits, windows))
    generators = [life for life in lives if life.kind == "generator"]
    sums: list[Causes] = [defaultdict(float) for _ in windows]
    parts = spread(generators, [interval for _, interval in inside])
    for (index, _), causes in zip(inside, parts, strict=True):
        for cause, seconds in causes.items():
            if cause != "start":
                sums[index][cause] += seconds
    return [
        {cause: seconds / sum(spent.values()) for cause, seconds in spent.items()} for spent in sums
    ]


def _within(
    intervals: Sequence[Interval], windows: Sequence[Interval]
) -> Iterator[tuple[int, Interval]]:
    """The parts of `intervals` that lie in a window, with its index; both ascend and do not overlap."""
    at = 0
    for index, (start_s, end_s) in enumerate(windows):
        while at < len(intervals) and intervals[at][1] <= start_s:
            at += 1
        inside = at
        while inside < len(intervals) and intervals[inside][0] < end_s:
            yield index, (max(intervals[inside][0], start_s), min(intervals[inside][1], end_s))
            inside += 1


def _whole(
    lives: Sequence[Life], window: Interval, split: Split | None, alerts: Collection[str]
) -> dict[str, Any]:
    """Shares of the training as a whole, and the sentence about them.

    The window of a resumed run holds the start-up of its later attempts, which `diagnose` takes out; so
    do the shares, unless start-up is what the sentence names.
    """
    found = diagnose(
        kind_shares(lives, window), split, meanwhile=_meanwhile(lives, [window])[0], alerts=alerts
    )
    spent = {kind: spread([li for li in lives if li.kind == kind], [window])[0] for kind in KINDS}
    if found.limit != "start":
        for causes in spent.values():
            causes.pop("start", None)
    return {
        "shares": {
            kind: {cause: round(s / sum(causes.values()), 4) for cause, s in causes.items()}
            for kind, causes in spent.items()
            if causes
        },
        "limit": found.limit,
        "sentence": found.text,
    }
