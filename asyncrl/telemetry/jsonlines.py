"""JSON as it is found on disk: half written, by another version, or by somebody else.

What is not a whole object is None, and so is a number that is none: readers drop it and go on.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]

LARGEST = 1e100
"""Numbers beyond it are none: sums and products of a few of them would not be finite."""

_DEEPEST = 20
"""Levels of a tree that are kept; programs that walk it recurse."""


def parse(line: bytes) -> Record | None:
    """The object in `line`, its NaN and infinities as None; None if there is no such object."""
    try:
        record = json.loads(line, parse_constant=_nothing)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_lines(path: Path) -> Iterator[Record]:
    """Every object of a JSON-lines file; none if there is no such file."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for line in file:
            if (record := parse(line)) is not None:
                yield record


def number(value: object) -> float | None:
    """The value if it is a number of at most LARGEST, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST <= value <= LARGEST else None


def integer(value: object) -> int | None:
    """The value if it is an integer that a double holds exactly (|value| < 2^53), else None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) < 2**53 else None


def tree(value: object, depth: int = _DEEPEST) -> Any:  # noqa: ANN401
    """The same value, which JSON can hold: other kinds, and what lies deeper than `depth`, are None."""
    if isinstance(value, dict):
        return {str(k): tree(v, depth - 1) for k, v in value.items()} if depth > 0 else None
    if isinstance(value, list):
        return [tree(v, depth - 1) for v in value] if depth > 0 else None
    if isinstance(value, str | bool):
        return value
    whole = integer(value)
    return whole if whole is not None else number(value)


def _nothing(_constant: str) -> None:
    """NaN and infinities, which JSON has not and other writers use: no number."""
