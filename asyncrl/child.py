"""One process of a run, as its supervisor sees it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from asyncrl.causes import error_file
from asyncrl.errors import PeerLostError
from asyncrl.family import die_with_parent

_TERMINATE_S = 4.0
"""Between SIGTERM and SIGKILL; with reaping it keeps the end of a run under 10 s."""

_TERMINATE_BROKER_S = 1.0
"""The same for the broker, which has no model to leave."""

STAGGER_S = 45.0
"""How long an engine of a shared GPU is given to load before the next one starts beside it."""


@dataclass(slots=True)
class Child:
    """One process of the run."""

    name: str
    command: list[str]
    cores: list[int]
    gpus: list[str] | None
    restarts_left: int
    after: "Child | None" = None
    """The engine before it on the same GPU: two that load at once slow each other down, and the second
    one finds what the first one compiled in vLLM's cache."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variables of its own, over all others; looked up at each start."""

    incarnation: int = 0
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    joined: bool = False
    finished: bool = False

    def may_start(self, now_s: float) -> bool:
        """Whether it has not started yet, and need not wait (any more) for the one before it."""
        if self.process is not None:
            return False
        before = self.after
        if before is None or before.joined:
            return True
        return before.process is not None and now_s > before.started_s + STAGGER_S

    def joined_file(self, run_dir: Path) -> Path:
        """Made by the process once the broker has welcomed it."""
        return run_dir / "joined" / self.name

    def spawn(self, run_dir: Path, *, pin: bool) -> None:
        """Start it (again); its output goes to logs/<name>.log."""
        for stale in (error_file(run_dir, self.name), self.joined_file(run_dir)):
            stale.unlink(missing_ok=True)
        environment = os.environ | {
            "OMP_NUM_THREADS": str(len(self.cores)),
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        environment |= self.environment
        log_path = run_dir / "logs" / f"{self.name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log_file:
            again = ["--incarnation", str(self.incarnation)] if self.incarnation else []
            self.process = subprocess.Popen(
                [*self.command, *again],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self.started_s = time.monotonic()
        self.joined = False
        if pin:
            with contextlib.suppress(ProcessLookupError):  # it may have failed already
                os.sched_setaffinity(self.process.pid, self.cores)

    def wait(self, *, limit_s: float) -> int:
        """The exit code of a process that was spawned and ends by itself.

        Raises:
            PeerLostError: it has not ended after `limit_s`.
        """
        assert self.process is not None, "spawned"
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise PeerLostError(
                f"{self.name} did not end within host.start_timeout_s={limit_s:g}; its log is "
                f"logs/{self.name}.log in the run's folder"
            ) from error

    def signal_session(self, number: signal.Signals) -> None:
        """Signal the whole session: torchrun's ranks and scoring workers included."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def stop(children: Collection[Child]) -> None:
    """SIGTERM, then SIGKILL, to each one's whole session; all of them are reaped.

    The broker's turn comes last: the others take leave of it, and without it would wait to do so.
    """
    alive = [c for c in children if c.process and c.process.poll() is None]
    _terminate([c for c in alive if c.name != "broker"], limit_s=_TERMINATE_S)
    _terminate([c for c in alive if c.name == "broker"], limit_s=_TERMINATE_BROKER_S)
    for child in children:
        child.signal_session(signal.SIGKILL)
        if child.process is not None:
            child.process.wait()


def _terminate(children: Collection[Child], *, limit_s: float) -> None:
    """Send SIGTERM and wait until all have ended, or for `limit_s`."""
    for child in children:
        child.signal_session(signal.SIGTERM)
    deadline_s = time.monotonic() + limit_s
    while any(c.process and c.process.poll() is None for c in children):
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
