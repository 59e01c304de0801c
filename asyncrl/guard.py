"""The outermost frame of a process: every error on record, and how the process leaves.

It turns an error into one line, a record for the supervisor, and an exit code (0 done, 1 failed, 2 usage
or config).
"""

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from asyncrl.causes import error_file
from asyncrl.errors import ConfigError, RefusedError
from asyncrl.family import die_with_parent

log = logging.getLogger("asyncrl")


def guard(name: str, body: Callable[[], None], *, run_dir: Path, supervised: bool) -> int:
    """Run `body` as the process `name` of the run in `run_dir`; the exit code."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if supervised:
        die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, _exit_on_signal)
    path = error_file(run_dir, name)
    try:
        if not supervised:
            path.unlink(missing_ok=True)  # of an earlier run; a supervisor has removed it
        body()
    except Exception as error:
        says_all = isinstance(error, ConfigError | RefusedError)
        log.error("%s failed: %s", name, error, exc_info=not says_all)
        record = {"type": type(error).__name__, "message": str(error), "time_s": time.time()}
        record_first(path, json.dumps(record) + "\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import large libraries in here: the garbage collector looks neither now nor later at them.

    Of torch and transformers, which live as long as the process, it would find nothing, in a fifth of
    the time that the import takes and once more, for most of a second, when the process ends.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def record_first(path: Path, text: str) -> None:
    """Write `path` as a whole unless it exists: of several ranks the first to fail is the cause."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    except OSError as error:  # a full disk may be the very failure
        log.error("%s could not be written: %s", path, error)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _exit_on_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def leave(code: int) -> NoReturn:
    """End this process without the interpreter's own exit, in which libraries may hang or abort."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
