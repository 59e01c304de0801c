"""Reads a run folder that may be half written: of a run that still goes, was killed, or filled its disk.

Whatever is not a whole JSON object in one line is passed over; what is missing is empty. Nothing here
writes to the folder.
"""

import tomllib
from pathlib import Path
from typing import Any

from asyncrl.telemetry.bottleneck import Split
from asyncrl.telemetry.jsonlines import Record, parse, read_lines

_TAIL_BYTES = 2**16


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
    return [record for line in lines if (record := parse(line)) is not None]


def read_by(path: Path, key: str) -> list[Record]:
    """Objects in the order of an integer `key`, the last written of several; others are left out."""
    found = {record[key]: record for record in read_lines(path) if isinstance(record.get(key), int)}
    return [found[value] for value in sorted(found)]


def read_object(path: Path) -> Record:
    """The object in a JSON file; {} if there is none."""
    try:
        return parse(path.read_bytes()) or {}
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
