"""Which processes may work in one `out` at a time.

Invariants: they all cut the plan into equally many parts, each part is one process's, and so is each run
from the look at its folder until its row is written; what was known of a run before is not relied on.
All are flock(2)s, which the kernel gives back however the holder ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from asyncrl.errors import ConfigError
from asyncrl.run_folder import exclusive


@contextlib.contextmanager
def part_of(folder: Path, index: int, count: int) -> Iterator[None]:
    """Be the only process of part `index` of `count`, beside others of the same `count`.

    Raises:
        ConfigError: another process has this part, or a process of another count works in the folder,
            or it cannot be written to.
    """
    with exclusive(folder, key="out", name=f"lock-{index}-of-{count}"):
        shards = os.open(folder / "shards", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _agree(shards, folder, count)
            yield
        finally:
            os.close(shards)


def _agree(shards: int, folder: Path, count: int) -> None:
    """Hold the file of the count together with others of it; the first one writes it.

    A lock is not turned from exclusive into shared at once: what counts is read under the shared one.
    """
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(shards, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(shards, 0)
        os.pwrite(shards, str(count).encode(), 0)
    fcntl.flock(shards, fcntl.LOCK_SH)  # held exclusively for no longer than a write takes
    found = os.pread(shards, 32, 0).decode()
    if found != str(count):
        raise ConfigError(
            f"out={str(folder)!r} is in use by a sweep with --shard I/{found}, and this one has I/{count}"
            f", which takes some of the same runs; take I/{found} too, or wait until that one has ended"
        )


def take_run(folder: Path, name: str) -> IO[str] | None:
    """Be the only sweep that starts and finishes this run, until what is returned is closed.

    None if another one has it. The run's own lock does not do: it is free while the run's process starts,
    and again before its row is written.
    """
    path = folder / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
