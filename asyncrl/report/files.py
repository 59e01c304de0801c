"""Reads a run folder that may be half written: of a run that still goes, was killed, or filled its disk.

Whatever is not a whole JSON object in one line is passed over; what is missing is empty. Nothing here
writes to the folder.
"""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.telemetry.bottleneck import Split

Record = dict[str, Any]

_TAIL_BYTES = 2**16


def read_lines(path: Path) -> Iterator[Record]:
    """Every object of a JSON-lines file; none if there is no such file."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for line in file:
            if (record := _parsed(line)) is not None:
                yield record


def read_tail(path: Path) -> list[Record]:
    """The last objects of a JSON-lines file, as many as lie whole within its last 64 KiB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    if size > _TAIL_BYTES:
        lines = lines[1:]
    return [record for line in lines if (record := _parsed(line)) is not None]


def read_by(path: Path, key: str) -> list[Record]:
    """Objects in the order of an integer `key`, the last written of several; others are left out."""
    found = {record[key]: record for record in read_lines(path) if isinstance(record.get(key), int)}
    return [found[value] for value in sorted(found)]


def read_object(path: Path) -> Record:
    """The object in a JSON file; {} if there is none."""
    try:
        return _parsed(path.read_bytes()) or {}
    except OSError:
        return {}


def read_config(run_dir: Path) -> tuple[Record, str]:
    """The resolved configuration as a tree and as its text; empty if there is none.

    Not validated: the page of an old run must not fail because a setting has been renamed since.
    """
    try:
        text = (run_dir / "config.toml").read_text("utf-8")
        return tomllib.loads(text), text
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}, ""


def read_split(run_dir: Path) -> Split | None:
    """The run's GPUs by side, if each serves one."""
    found = read_object(run_dir / "run.json").get("gpu_split")
    try:
        return Split(**found) if found else None
    except TypeError:
        return None


def setting(config: Record, path: str, default: Any = None) -> Any:  # noqa: ANN401
    """`section.key` of a configuration as it was read; `default` if it is not there."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def number(value: object) -> float | None:
    """The value if it is a finite number (JSON of others may hold NaN), else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < float("inf") else None


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line, parse_constant=_nothing)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _nothing(_constant: str) -> None:
    """NaN and infinities, which JSON has not and other writers use: no number."""
