"""Rollouts for the browser: groups once, rollouts as rows, few enough for a page that opens at once.

A page holds at most `budget_bytes` of them, measured as they lie in the file: beyond that whole groups
are left out, evenly over the run, and the page says how many. Rows are lists (ROW names their places),
because names would be most of the page.

A group that was dropped with its payload (broker/drops.py) is shown among the others, with its reason as
its rollouts' fate.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.errors import ProtocolError
from asyncrl.telemetry.jsonlines import Record, number, read_lines
from asyncrl.types import RolloutGroup
from asyncrl.wire.codec import decode_group

GROUP = ("step", "id", "ordinal", "generator", "prompt", "answer")
ROW = (
    "group", "index", "text", "score", "advantage", "fate", "finish", "verdict", "detail", "num_tokens",
    "spans", "mean_behaviour_logprob", "tokens",
)  # fmt: skip
TOKENS = ("text", "behaviour_logprobs", "proximal_logprobs", "behaviour_weights")


@dataclass(slots=True)
class Browser:
    """What the page gets."""

    groups: list[list[Any]] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    num_found: int = 0
    """Rollouts on record, shown or not."""

    def as_json(self) -> dict[str, Any]:
        """With the places' names."""
        return {
            "names": {"group": GROUP, "row": ROW, "tokens": TOKENS},
            "groups": self.groups, "rows": self.rows, "num_found": self.num_found,
        }  # fmt: skip


def browse(run_dir: Path, *, budget_bytes: int) -> Browser:
    """The rollouts of a run folder, within the budget."""
    path = run_dir / "rollouts.jsonl"
    size = path.stat().st_size if path.exists() else 0
    share = 1.0 if size <= budget_bytes else budget_bytes / size
    found = Browser()
    numbers: dict[tuple[int, int], int] = {}
    num_groups = 0
    last: tuple[int, int] | None = None
    for record in read_lines(path):
        step, group_id = record.get("step"), record.get("group_id")
        if not isinstance(step, int) or not isinstance(group_id, int):
            continue
        found.num_found += 1
        key = (step, group_id)
        if key != last:
            last = key
            num_groups += 1
            if int(num_groups * share) > int((num_groups - 1) * share):
                numbers[key] = len(found.groups)
                found.groups.append(_group(step, record))
        if key in numbers:
            found.rows.append(_row(numbers[key], record))
    for step, reason, group in dropped_groups(read_lines(run_dir / "drops.jsonl")):
        _add_dropped(found, step, reason, group)
    return found


def dropped_groups(drops: Iterable[Record]) -> Iterator[tuple[int, str, RolloutGroup]]:
    """(version, reason, group) of every drop whose payload was kept and can be read."""
    for drop in drops:
        payload, version = drop.get("payload"), drop.get("version")
        if not isinstance(payload, list) or not isinstance(version, int):
            continue
        try:
            frames = [base64.b64decode(str(frame), validate=True) for frame in payload]
            yield version, str(drop.get("reason", "")), decode_group(frames)
        except (binascii.Error, ProtocolError):
            continue


def _group(step: int, record: Record) -> list[Any]:
    return [
        step, record["group_id"], record.get("ordinal", 0), _text(record, "generator"),
        _text(record, "prompt"), _text(record, "answer"),
    ]  # fmt: skip


def _row(group: int, record: Record) -> list[Any]:
    tokens = record.get("tokens")
    return [
        group, record.get("index", 0), _text(record, "text"), number(record.get("score")),
        number(record.get("advantage")), _text(record, "fate"), _text(record, "finish_reason"),
        _text(record, "verdict"), _text(record, "detail"), record.get("num_tokens", 0),
        record.get("version_spans", []), number(record.get("mean_behaviour_logprob")),
        [tokens.get(name, []) for name in TOKENS] if isinstance(tokens, dict) else 0,
    ]  # fmt: skip


def _text(record: Record, name: str) -> str:
    value = record.get(name, "")
    return value if isinstance(value, str) else str(value)


def _add_dropped(found: Browser, step: int, reason: str, group: RolloutGroup) -> None:
    number_ = len(found.groups)
    found.groups.append([step, group.group_id, group.ordinal, "", group.prompt_text, group.answer])
    for index, rollout in enumerate(group.rollouts):
        found.num_found += 1
        logprobs = rollout.behaviour_logprobs.astype(np.float64)
        mean = float(logprobs.mean()) if len(logprobs) and np.isfinite(logprobs).all() else None
        spans = [[span.version, span.start, span.end] for span in rollout.version_spans]
        found.rows.append(
            [
                number_, index, rollout.text, rollout.verdict.score, None, f"dropped: {reason}",
                rollout.finish_reason, rollout.verdict.status, rollout.verdict.detail,
                len(logprobs), spans, mean, 0,
            ]
        )  # fmt: skip
