"""What a run of a sweep finds on its host: its folder's past, and its share of cores and GPUs."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

from asyncrl.config import RunConfig, read_config
from asyncrl.errors import ConfigError
from asyncrl.generator.choice import settled
from asyncrl.run_folder import is_in_use
from asyncrl.sweep.plan import PlannedRun
from asyncrl.sweep.row import Row, read_row
from asyncrl.sweep.settings import SweepSettings

State = Literal["done", "ended", "new", "resume", "busy"]
"""done: has its row; ended: all was trained, the row is missing; busy: somebody works in it."""

T = TypeVar("T")

CONSOLE = "console.log"
"""What the run printed; beside its records."""

_PARTS = {
    "metrics": ["metrics.jsonl", "metrics.jsonl.set-aside"],
    "rollouts": [
        "rollouts.jsonl",
        "rollouts.jsonl.set-aside",
        "drops.jsonl",
        "drops.jsonl.set-aside",
    ],
    "trace": ["trace"],
    "logs": ["logs", "restarts.jsonl", CONSOLE],
    "checkpoints": ["checkpoints"],
}
_PASSING = ["token", "broker.json", "joined", "errors", "lock"]


def state_of(run: PlannedRun) -> State:
    """How far the run has come; a failed one is new again.

    Raises:
        ConfigError: the folder holds a run with other settings.
    """
    if is_in_use(run.run_dir):
        return "busy"
    row = read_row(run.run_dir)
    if row is not None and row["outcome"] == "done":
        _check_same(run, row["digest"])
        return "done"
    if row is not None or not (run.run_dir / "run.json").exists():
        return "new"
    try:
        _check_same(run, _asked_digest(run, read_config(run.run_dir / "config.toml")))
    except ConfigError:
        if _newest_checkpoint(run.run_dir) == 0:
            return "new"  # nothing in it that would be lost
        raise
    newest = _newest_checkpoint(run.run_dir)
    if _outcome(run.run_dir) == "done":
        return "ended"
    return "resume" if 0 < newest < run.config.pipeline.num_steps else "new"


def row_of(run: PlannedRun) -> Row | None:
    """The run's row; None without one, or with a failed one of other settings, which is made again.

    Raises:
        ConfigError: the folder holds a finished run with other settings, or a score that is none.
    """
    row = read_row(run.run_dir)
    if row is None or row["digest"] == run.config.digest:
        return row
    if row["outcome"] == "done":
        _check_same(run, row["digest"])
    return None


def _asked_digest(run: PlannedRun, found: RunConfig) -> str:
    """Of the settings that were asked for: `asyncrl run` writes what it measured in place of "auto"."""
    probe = run.run_dir / "probe.json"
    if run.config.must_probe and probe.exists():
        measured = settled(run.config, json.loads(probe.read_text()))
        return run.config.digest if found.digest == measured.digest else found.digest
    return found.digest


def _check_same(run: PlannedRun, digest: str) -> None:
    if digest != run.config.digest:
        raise ConfigError(
            f"{run.run_dir} holds a run with settings of digest {digest}, the sweep's file asks for "
            f"{run.config.digest}; give another `out`, or delete that folder"
        )


def _newest_checkpoint(run_dir: Path) -> int:
    folders = (run_dir / "checkpoints").glob("version-*")
    return max((int(path.name.removeprefix("version-")) for path in folders), default=0)


def _outcome(run_dir: Path) -> str:
    path = run_dir / "summary.json"
    return json.loads(path.read_text())["outcome"] if path.exists() else ""


def seconds_of(run_dir: Path) -> float:
    """Wall clock of the last attempt of a run that has ended, as it measured that itself."""
    return 60.0 * float(json.loads((run_dir / "summary.json").read_text())["last_attempt_minutes"])


def clear(run_dir: Path) -> None:
    """Remove what an earlier attempt left."""
    shutil.rmtree(run_dir, ignore_errors=True)


def prune(run_dir: Path, settings: SweepSettings) -> None:
    """Remove from a finished run what `keep` does not name."""
    names = [n for part, of in _PARTS.items() if part not in settings.keep for n in of]
    for name in [*names, *_PASSING]:
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def cause_of(run: PlannedRun, code: int) -> str:
    """Why a run failed, in the words that it printed last."""
    path = run.run_dir / CONSOLE
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for mark in ("FAILED: ", "asyncrl: "):
        for line in reversed(lines):
            if line.startswith(mark):
                return line.removeprefix(mark)
    return f"exit code {code}" + (f": {lines[-1]}" if lines else "")


def blocks(things: Sequence[T], count: int) -> list[list[T]]:
    """`things` in order, cut into `count` parts whose sizes differ by one at most."""
    return [
        list(things[len(things) * i // count : len(things) * (i + 1) // count])
        for i in range(count)
    ]


def share_cores(cores: Sequence[int], num_parallel: int) -> list[list[int]]:
    """Disjoint cores for each of the runs at a time.

    Raises:
        ConfigError: fewer cores than runs.
    """
    if num_parallel > len(cores):
        raise ConfigError(
            f"num_parallel={num_parallel} runs need as many cores, this process may use {len(cores)}"
        )
    return blocks(cores, num_parallel)


def share_gpus(gpus: Sequence[str], num_parallel: int) -> list[list[str]]:
    """GPUs of each of the runs at a time: disjoint if there are enough, else all for all."""
    if len(gpus) < num_parallel:
        return [list(gpus)] * num_parallel
    return blocks(gpus, num_parallel)
