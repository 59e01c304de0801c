"""How a run ended, or that it has not: from what it left on disk.

| state       | because                                                                  |
|-------------|--------------------------------------------------------------------------|
| running     | somebody holds the folder's lock, or its records grew within a minute    |
| done        | summary.json says so, which an attempt removes when it begins            |
| interrupted | "                                                                        |
| failed      | ", with the cause; or a process left an error                            |
| killed      | none of these: whoever kept its records was killed                       |
| empty       | the folder holds no run                                                  |
"""

import fcntl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.causes import is_known, root_cause
from asyncrl.report.files import read_object
from asyncrl.run_folder import NOTHING_SAVED, newest_checkpoint

State = Literal["running", "done", "interrupted", "failed", "killed", "empty"]

_GROWING_S = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state in a word and in a sentence."""

    state: State
    text: str


def read_verdict(run_dir: Path) -> Verdict:
    """Judge a run folder."""
    if is_locked(run_dir / "lock"):
        return Verdict("running", "the run is going on")
    summary = read_object(run_dir / "summary.json")
    if summary.get("outcome") == "done":
        return Verdict("done", "all steps were trained")
    if summary.get("failure"):
        return Verdict("failed", str(summary["failure"]))
    failed = [path.stem for path in (run_dir / "errors").glob("*.json") if read_object(path)]
    ended = [(name, 1) for name in failed]
    if summary.get("outcome") == "interrupted" and not is_known(run_dir, ended):  # all lost it only
        saved = newest_checkpoint(run_dir) is not None
        more = " and can be resumed" if saved else f"; {NOTHING_SAVED}"
        return Verdict("interrupted", f"it was interrupted (Ctrl-C or a signal){more}")
    if ended:
        return Verdict("failed", root_cause(run_dir, ended))
    if summary:
        return Verdict("failed", "a process ended without leaving an error; see logs/")
    if not (run_dir / "metrics.jsonl").exists() and not (run_dir / "run.json").exists():
        return Verdict("empty", "the folder holds no run")
    if time.time() - _last_write(run_dir) < _GROWING_S:
        return Verdict("running", "records were written within the last minute")
    return Verdict(
        "killed",
        "it left no summary: whoever kept its records (the supervisor, or a learner by hand) was killed",
    )


def is_locked(path: Path) -> bool:
    """Whether a supervisor, or a learner started by hand, holds flock(2) on the file.

    Tried with a shared lock that is given back at once: while a run goes on it is never obtained.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or another user's
        return False
    return False


def _last_write(run_dir: Path) -> float:
    names = ("metrics.jsonl", "evals.jsonl", "rollouts.jsonl", "run.json")
    paths = [path for name in names if (path := run_dir / name).exists()]
    return max(path.stat().st_mtime for path in (*paths, *(run_dir / "trace").glob("*.jsonl")))
