"""One attempt at a run, on record: config.toml and run.json as it begins, summary.json however it ends.

A supervisor keeps these records. Of a run whose processes are started one by one, its learner does, in
whose folder the steps are.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from asyncrl.config import RunConfig, to_toml
from asyncrl.run_folder import begin_attempt, check_unused, exclusive
from asyncrl.telemetry.console import summary
from asyncrl.telemetry.jsonlines import read_lines
from asyncrl.telemetry.provenance import provenance

Outcome = Literal["done", "interrupted", "failed"]


def begin(run_dir: Path, config: RunConfig, *, run_id: str | None = None) -> str:
    """Write config.toml and run.json; the run's id, which is `run_id` if somebody has given one."""
    (run_dir / "config.toml").write_text(to_toml(config.without_resume()))
    record = provenance() | {"run_id": run_id or secrets.token_hex(6), "seed": config.seed}
    return begin_attempt(run_dir, record, keep_id=run_id is None)


def keep_restart(run_dir: Path, process: str, why: str) -> None:
    """Put one line at the end of restarts.jsonl, which holds those of all attempts.

    Args:
        run_dir: the folder of `begin`.
        process: who is started again.
        why: how it ended, as causes.cause says it.
    """
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    record = {"process": process, "cause": why.removeprefix(f"{process}: "), "time": now}
    # A full disk ends no run that would go on.
    with contextlib.suppress(OSError), (run_dir / "restarts.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def end(run_dir: Path, outcome: Outcome, *, started_s: float, failure: str = "") -> dict[str, Any]:
    """Write summary.json: numbers, which are returned, outcome and restarts of all attempts.

    Args:
        run_dir: the folder of `begin`.
        outcome: how the attempt ended.
        started_s: when it began, of time.monotonic().
        failure: why it failed; if empty, the files in errors/ tell.
    """
    found = summary(run_dir)
    found["last_attempt_minutes"] = round((time.monotonic() - started_s) / 60, 2)
    ended: dict[str, Any] = {"outcome": outcome} | ({"failure": failure} if failure else {})
    ended["restarts"] = list(read_lines(run_dir / "restarts.jsonl"))
    (run_dir / "summary.json").write_text(json.dumps(found | ended, indent=1) + "\n")
    return found


def keep_by_hand(run_dir: Path, config: RunConfig, *, run_id: str, train: Callable[[], int]) -> int:
    """The whole life of a learner without a supervisor, on record; the exit code that `train` returns.

    Raises:
        ConfigError: the folder holds another run, or somebody works in it; it stays as it was.
    """
    with exclusive(run_dir, key="--run-dir"):
        check_unused(run_dir, config)
        begin(run_dir, config, run_id=run_id)
        started_s = time.monotonic()
        outcome: Outcome = "interrupted"  # unless it comes to an end of its own
        try:
            code = train()
            outcome = "failed" if code else "done"
            return code
        finally:
            with contextlib.suppress(OSError):  # a full disk may be the very failure
                end(run_dir, outcome, started_s=started_s)
