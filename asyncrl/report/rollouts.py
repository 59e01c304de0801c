"""Rollouts for the browser: groups once, rollouts as rows, few enough for a page that opens at once.

A page holds at most `budget_bytes` of them, measured as they lie in rollouts.jsonl and, payloads of
groups that were dropped (broker/drops.py), in drops.jsonl: beyond that whole groups are left out, evenly
over both, and the page says how many rollouts. Rows are lists (ROW names their places), because names
would be most of the page.

A dropped group is shown among the others, with its reason as its rollouts' fate.
"""

import base64
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from asyncrl.errors import ProtocolError
from asyncrl.report.shapes import DROP, ROLLOUT, TOKENS, fit, is_version, is_whole
from asyncrl.telemetry.jsonlines import Record, number, parse
from asyncrl.types import Rollout
from asyncrl.wire.codec import decode_group

GROUP = ("step", "id", "ordinal", "generator", "prompt", "answer")
ROW = (
    "group", "index", "text", "score", "advantage", "fate", "finish", "verdict", "detail", "num_tokens",
    "spans", "mean_behaviour_logprob", "tokens",
)  # fmt: skip


@dataclass(slots=True)
class Browser:
    """What the page gets."""

    groups: list[list[Any]] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    """By file: rollouts that the budget has no room for."""

    @property
    def num_found(self) -> int:
        """Rollouts on record, shown or not."""
        return len(self.rows) + sum(self.left_out.values())

    def as_json(self) -> dict[str, Any]:
        """With the places' names."""
        return {
            "names": {"group": GROUP, "row": ROW, "tokens": TOKENS},
            "groups": self.groups, "rows": self.rows, "num_found": self.num_found,
            "left_out": self.left_out,
        }  # fmt: skip


@dataclass(slots=True)
class _Place:
    """Where a group's lines lie in a file."""

    key: Hashable
    start: int
    size: int
    num_rollouts: int


def browse(run_dir: Path, *, budget_bytes: int) -> Browser:
    """The rollouts of a run folder, within the budget."""
    found = Browser()
    with (
        _opened(run_dir / "rollouts.jsonl") as trained,
        _opened(run_dir / "drops.jsonl") as dropped,
    ):
        places = [(trained, place) for place in _trained(trained)]
        places += [(dropped, place) for place in _dropped(dropped)]
        shown = evenly([place.size for _, place in places], budget_bytes)
        for (file, place), is_shown in zip(places, shown, strict=True):
            if is_shown and file is trained:
                records = (fit(record, ROLLOUT) for record in _records(file, place))
                _add(found, [record for record in records if _key(record) == place.key])
            elif is_shown:
                for drop in _records(file, place):
                    _add_dropped(found, fit(drop, DROP))
            else:
                name = "rollouts.jsonl" if file is trained else "drops.jsonl"
                found.left_out[name] = found.left_out.get(name, 0) + place.num_rollouts
    return found


def evenly(sizes: Sequence[int], budget: int) -> list[bool]:
    """Which of the groups of these sizes to show: all, or evenly spread ones that fit the budget."""
    total, budget = sum(sizes), max(0, budget)
    share = 1.0 if total <= budget else budget / total
    while True:
        shown = [int((i + 1) * share) > int(i * share) for i in range(len(sizes))]
        spent = sum(size for size, is_shown in zip(sizes, shown, strict=True) if is_shown)
        if spent <= budget:
            return shown
        share *= min(budget / spent, 0.98)  # those that it hit were larger than the others


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError:
        return BytesIO()


def _trained(file: BinaryIO) -> list[_Place]:
    """The groups of rollouts.jsonl: neighbouring lines of one step and group."""
    places: list[_Place] = []
    at = 0
    for line in file:
        if (key := _key(parse(line) or {})) is not None:
            if not places or places[-1].key != key:
                places.append(_Place(key, at, 0, 0))
            places[-1].size = at + len(line) - places[-1].start
            places[-1].num_rollouts += 1
        at += len(line)
    return places


def _key(record: Record) -> tuple[int, int] | None:
    step, group_id = record.get("step"), record.get("group_id")
    return (step, group_id) if is_version(step) and is_whole(group_id) else None


def _dropped(file: BinaryIO) -> list[_Place]:
    """The lines of drops.jsonl with a payload."""
    places: list[_Place] = []
    at = 0
    for line in file:
        record = parse(line) or {}
        if isinstance(record.get("payload"), list) and is_version(record.get("version")):
            scores = record.get("scores")
            count = len(scores) if isinstance(scores, list) else 0
            places.append(_Place(at, at, len(line), count))
        at += len(line)
    return places


def _records(file: BinaryIO, place: _Place) -> Iterator[Record]:
    """The objects in a place."""
    file.seek(place.start)
    for line in file.read(place.size).split(b"\n"):
        if (record := parse(line)) is not None:
            yield record


def _add(found: Browser, records: Sequence[Record]) -> None:
    if not records:  # the file was cut since
        return
    found.groups.append(_group(records[0]["step"], records[0]))
    found.rows += [_row(len(found.groups) - 1, record) for record in records]


def _group(step: int, record: Record) -> list[Any]:
    return [
        step, record["group_id"], record.get("ordinal", 0), record.get("generator", ""),
        record.get("prompt", ""), record.get("answer", ""),
    ]  # fmt: skip


def _row(group: int, record: Record) -> list[Any]:
    tokens = record.get("tokens")
    return [
        group, record.get("index", 0), record.get("text", ""), record.get("score"),
        record.get("advantage"), record.get("fate", ""), record.get("finish_reason", ""),
        record.get("verdict", ""), record.get("detail", ""), record.get("num_tokens", 0),
        record.get("version_spans", []), record.get("mean_behaviour_logprob"),
        0 if tokens is None else [tokens.get(name, []) for name in TOKENS],
    ]  # fmt: skip


def _add_dropped(found: Browser, drop: Record) -> None:
    """A group whose payload cannot be read is not shown."""
    try:
        frames = [base64.b64decode(frame, validate=True) for frame in drop.get("payload", ())]
        group = decode_group(frames)
    except (ValueError, ProtocolError):
        return
    found.groups.append(
        [drop["version"], group.group_id, group.ordinal, "", group.prompt_text, group.answer]
    )
    fate = f"dropped: {drop.get('reason', '')}"
    found.rows += [
        _dropped_row(len(found.groups) - 1, index, rollout, fate)
        for index, rollout in enumerate(group.rollouts)
    ]


def _dropped_row(group: int, index: int, rollout: Rollout, fate: str) -> list[Any]:
    logprobs = rollout.behaviour_logprobs.astype(np.float64)
    mean = float(logprobs.mean()) if len(logprobs) and np.isfinite(logprobs).all() else None
    spans = [[span.version, span.start, span.end] for span in rollout.version_spans]
    return [
        group, index, rollout.text, number(rollout.verdict.score), None, fate, rollout.finish_reason,
        rollout.verdict.status, rollout.verdict.detail, len(logprobs), spans, mean, 0,
    ]  # fmt: skip
