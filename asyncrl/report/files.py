"""Reads a run folder that may be half written: of a run that still goes, was killed, or filled its disk.

Whatever is not a whole JSON object in one line is passed over; what is missing is empty. Nothing here
writes to the folder.
"""

import tomllib
from pathlib import Path
from typing import Any

from asyncrl.report.shapes import RESTART, Shape, fit
from asyncrl.telemetry.bottleneck import Split
from asyncrl.telemetry.jsonlines import Record, integer, parse, read_lines, tree

_TAIL_BYTES = 2**16
_MOST_TAIL_BYTES = 2**22


def read_tail(path: Path, num_least: int) -> list[Record]:
    """The last objects of a JSON-lines file: those that lie whole within its last 64 KiB.

    If these are fewer than `num_least`, within twice as much, and so on up to 4 MiB: a line with every
    token of a rollout, or with the payload of a dropped group, may have a megabyte and more.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            length = _TAIL_BYTES
            while True:
                file.seek(max(0, size - length))
                lines = file.read(length).split(b"\n")
                found = [
                    record
                    for line in (lines[1:] if size > length else lines)
                    if (record := parse(line)) is not None
                ]
                if len(found) >= num_least or length >= min(size, _MOST_TAIL_BYTES):
                    return found
                length *= 2
    except OSError:
        return []


def read_by(path: Path, key: str, shape: Shape) -> list[Record]:
    """Records in the order of their integer `key`, the last written of several.

    Those without are left out.
    """
    records = (fit(record, shape) for record in read_lines(path))
    found = {record[key]: record for record in records if key in record}
    return [found[value] for value in sorted(found)]


def read_object(path: Path) -> Record:
    """The object in a JSON file, as a tree of finite numbers (jsonlines.tree); {} if there is none."""
    try:
        found: Record = tree(parse(path.read_bytes()) or {})
    except OSError:
        return {}
    return found


def read_config(run_dir: Path) -> tuple[Record, str]:
    """The resolved configuration as a tree and as its text; empty if there is none.

    Not validated: the page of an old run must not fail because a setting has been renamed since. Dates,
    and infinities, which JSON has not, are None.
    """
    try:
        text = (run_dir / "config.toml").read_text("utf-8")
        return tree(tomllib.loads(text)), text
    except (OSError, ValueError, RecursionError):  # no file, no UTF-8 or TOML, nested without end
        return {}, ""


def read_split(run_dir: Path) -> Split | None:
    """The run's GPUs by side, if each serves one."""
    found = read_object(run_dir / "run.json").get("gpu_split")
    if not isinstance(found, dict):
        return None
    learner, generators = integer(found.get("learner")), integer(found.get("generators"))
    if learner is None or generators is None or min(learner, generators) < 1:
        return None
    return Split(learner=learner, generators=generators)


def read_restarts(run_dir: Path) -> list[str]:
    """A sentence for each process that the supervisor started again, in their order."""
    records = (fit(record, RESTART) for record in read_lines(run_dir / "restarts.jsonl"))
    return [
        f"{r['process']}: {r['cause']}; started again at {r['time']}"
        for r in records
        if r.keys() == RESTART.fields.keys()
    ]


def setting(config: Record, path: str, default: Any = None) -> Any:  # noqa: ANN401
    """`section.key` of a configuration as it was read; `default` if it is not there."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value
