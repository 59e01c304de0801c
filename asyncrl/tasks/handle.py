"""The parent's end of one scoring process (worker.py): pipes that never block, and how it ended.

A handle holds the items its process was given, oldest first; the process scores them in that order,
so only the first can be the one it is working on.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.tasks.base import Problem
from asyncrl.tasks.worker import EXIT_OUT_OF_MEMORY, pack_frame, unpack_body

MAX_REPLY_BYTES = 2**14
MAX_BACKLOG_BYTES = 2**20
"""Reply bytes taken in one go, so that a process that floods its pipe cannot hold up the parent."""

MAX_STDERR_BYTES = 2**20
STDERR_TAIL_BYTES = 2000


class Item:
    """One completion on its way to a verdict."""

    def __init__(self, key: int, problem: Problem, completion: str) -> None:
        self.key = key
        self.frame = pack_frame(
            key, completion, problem.answer, problem.messages, problem.raw_text, problem.reference
        )
        self.num_sent = 0
        self.sent_s = 0.0
        """When its latest byte was written."""

    @property
    def is_sent(self) -> bool:
        """Whether a worker has all of it."""
        return self.num_sent == len(self.frame)


class WorkerHandle:
    """One scoring process and the items it holds."""

    def __init__(self, settings: str) -> None:
        """Start the process with `settings` (worker.py); it is of use once it says "ready"."""
        # A file, not a pipe: a pipe that nobody reads for a while would stall whatever prints.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "asyncrl.tasks.worker", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env=_worker_environment(),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin = self._process.stdin.fileno()
        self.stdout = self._process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self.items: deque[Item] = deque()
        self.is_ready = False
        self.started_s = time.monotonic()
        self.free_s = self.started_s
        """When it finished its latest item, by its own word."""

        self._received = bytearray()

    @property
    def pid(self) -> int:
        """Process id, and id of the process group of all that it starts."""
        return self._process.pid

    @property
    def has_unsent(self) -> bool:
        """Whether `send` has something to do."""
        return bool(self.items) and not self.items[-1].is_sent

    @property
    def has_ended(self) -> bool:
        """Whether the process is over; it stays a zombie until `end`, so its id is not reused."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def head_began_s(self) -> float:
        """When the process had its oldest item and was free to score it."""
        return max(self.items[0].sent_s, self.free_s)

    def send(self) -> None:
        """Write what the pipe takes of the items; that the process is over shows elsewhere."""
        for item in self.items:
            while not item.is_sent:
                try:
                    num_sent = os.write(self.stdin, memoryview(item.frame)[item.num_sent :])
                except (BlockingIOError, BrokenPipeError):
                    return
                item.num_sent += num_sent
                item.sent_s = time.monotonic()

    def receive(self) -> Iterator[list[Any]]:
        """Yield the complete replies that are there, in order.

        Raises:
            ValueError: what came is no reply; the process cannot be trusted any more.
        """
        while len(self._received) < MAX_BACKLOG_BYTES:
            try:
                part = os.read(self.stdout, 2**16)
            except BlockingIOError:
                break
            if not part:
                break
            self._received += part
        while (body := self._next_body()) is not None:
            yield unpack_body(body)

    def _next_body(self) -> bytes | None:
        if len(self._received) < 4:
            return None
        size = int.from_bytes(self._received[:4], "big")
        if size > MAX_REPLY_BYTES:
            raise ValueError(f"a reply claims {size} bytes, the limit is {MAX_REPLY_BYTES}")
        if len(self._received) < 4 + size:
            return None
        body = bytes(self._received[4 : 4 + size])
        del self._received[: 4 + size]
        return body

    def trim_stderr(self) -> None:
        """Keep a scorer that prints for days from filling the disk."""
        fd = self._stderr.fileno()
        if os.fstat(fd).st_size > MAX_STDERR_BYTES:
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)  # the process shares this offset

    def stderr_tail(self) -> str:
        """The last that it printed; not to be asked after `end`."""
        fd = self._stderr.fileno()
        start = max(0, os.fstat(fd).st_size - STDERR_TAIL_BYTES)
        return os.pread(fd, STDERR_TAIL_BYTES, start).decode(errors="replace").strip()

    def end(self) -> int:
        """Kill it and whatever it started, if they still run.

        Returns its exit code, or minus the signal that ended it.
        """
        os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                pipe.close()
        return code


def describe_end(code: int) -> str:
    """What `WorkerHandle.end` returned, in words."""
    if code == EXIT_OUT_OF_MEMORY:
        return "MemoryError: out of scoring.max_memory_bytes"
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _worker_environment() -> dict[str, str]:
    """Ours, with this very package in reach, one thread for numerics, and no GPU to fill."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root] if root not in _site_paths() else []
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _site_paths() -> list[str]:
    """Where installed packages lie; as PYTHONPATH they would come before the standard library."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
