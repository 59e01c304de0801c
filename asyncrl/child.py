"""One process of a run, as its supervisor sees it."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asyncrl.causes import error_file
from asyncrl.family import die_with_parent


@dataclass(slots=True)
class Child:
    """One process of the run."""

    name: str
    command: list[str]
    cores: list[int]
    gpus: list[str] | None
    restarts_left: int
    incarnation: int = 0
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    joined: bool = False
    finished: bool = False

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

    def signal_session(self, number: signal.Signals) -> None:
        """Signal the whole session: torchrun's ranks and scoring workers included."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
