"""Why a run failed, out of the exit codes of its processes and the errors that they left on record.

Who lost a peer is only the messenger: any other end comes first, then the earliest record.
"""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl.errors import AsyncRLError, DeviceError, WeightMismatchError
from asyncrl.telemetry.jsonlines import number, parse
from asyncrl.telemetry.terminal import printable

_SIGNALS = {
    signal.SIGBUS: "a file that it had mapped got shorter (model files written over in place?), "
    "or /dev/shm is full",
    signal.SIGKILL: "by somebody, or by the kernel for want of memory: see dmesg",
}
"""What is behind a signal that tells nothing by itself."""

_FULL_BYTES = 2**16
"""A disk with less room than this has just refused something."""


def error_file(run_dir: Path, name: str) -> Path:
    """Where the process `name` records the error that ended it: type, message, time_s."""
    return run_dir / "errors" / f"{name}.json"


def cause(run_dir: Path, name: str, code: int) -> str:
    """The end of one process, printable: its error, signal or exit code as known; its log if any."""
    error = _error(run_dir, name)
    if error is not None:
        what = printable(f"{error['type']}: {error['message']}")
    elif code < 0:
        what = f"killed by {signal.Signals(-code).name}"
        if hint := _SIGNALS.get(signal.Signals(-code)):
            what += f" ({hint})"
    else:
        what = f"exit code {code}"
        if _is_full(run_dir):
            what += ": the disk of run_dir is full, its error could not be written"
    log = run_dir / "logs" / f"{name}.log"
    return f"{name}: {what} (log: {log})" if log.exists() else f"{name}: {what}"


def is_mismatch(run_dir: Path, name: str) -> bool:
    """Whether a process ended because weights did not fit, or its engine did not have them."""
    return _is(WeightMismatchError, run_dir, name)


def is_device_fault(run_dir: Path, name: str) -> bool:
    """Whether a process ended because of its GPU, which need not happen again."""
    return _is(DeviceError, run_dir, name)


def root_cause(run_dir: Path, ended: Iterable[tuple[str, int]]) -> str:
    """`cause` of the process that failed first; `ended` are names and exit codes, at least one."""

    def rank(item: tuple[str, int]) -> tuple[bool, bool, float]:
        error = _error(run_dir, item[0])
        if error is None:
            return False, True, 0.0
        return error["type"] == "PeerLostError", False, error["time_s"]

    return cause(run_dir, *min(ended, key=rank))


def is_known(run_dir: Path, ended: Iterable[tuple[str, int]]) -> bool:
    """Whether anybody among `ended` is more than a messenger."""
    errors = [_error(run_dir, name) for name, _ in ended]
    return any(error is None or error["type"] != "PeerLostError" for error in errors)


def _is(kind: type[AsyncRLError], run_dir: Path, name: str) -> bool:
    error = _error(run_dir, name)
    return error is not None and error["type"] == kind.__name__


def _error(run_dir: Path, name: str) -> dict[str, Any] | None:
    """The record of an error; None if there is none, or it is cut or not of the form of `error_file`."""
    try:
        found = parse(error_file(run_dir, name).read_bytes())
    except OSError:
        return None
    if found is None or number(found.get("time_s")) is None:
        return None
    return found if all(isinstance(found.get(key), str) for key in ("type", "message")) else None


def _is_full(run_dir: Path) -> bool:
    try:
        facts = os.statvfs(run_dir)
    except OSError:
        return False
    return facts.f_bavail * facts.f_frsize < _FULL_BYTES
