"""Starts the runs of a sweep, some at a time, and leaves each with its row.

Invariants: a run is `asyncrl run` in a process and a folder of its own; a failed one is a row with its
cause and stops nothing; from the last look at its folder until its row is written a run is this process's
alone (locks.py), so that none is made twice; at the end of this process, however it comes, no run lives
on (a signal is passed on and waited for; a SIGKILL reaches the runs through the kernel, family.py).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import IO

from asyncrl.errors import ConfigError
from asyncrl.family import die_with_parent
from asyncrl.placement import visible_gpus
from asyncrl.sweep.host import (
    CONSOLE,
    cause_of,
    clear,
    prune,
    seconds_of,
    share_cores,
    share_gpus,
    state_of,
)
from asyncrl.sweep.locks import take_run
from asyncrl.sweep.plan import PlannedRun
from asyncrl.sweep.row import Row, done_row, failed_row, write_row
from asyncrl.sweep.settings import SweepSettings

_POLL_S = 0.1
_GRACE_S = 20.0
"""A supervisor that was told to end needs up to 10 s for its processes."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Slot:
    """What one run at a time may use."""

    cores: list[int]
    gpus: list[str]


@dataclass(slots=True)
class Active:
    """A run that has been started."""

    run: PlannedRun
    slot: Slot
    process: subprocess.Popen[bytes]
    started_s: float  # monotonic
    lock: IO[str]  # of take_run


@dataclass(slots=True)
class Runner:
    """Runs `runs` to their ends, `settings.num_parallel` at a time."""

    settings: SweepSettings
    runs: Sequence[PlannedRun]
    say: Callable[[str], None]
    num_failed: int = 0
    _active: list[Active] = field(default_factory=list)
    _num_ended: int = 0
    _stopping: bool = False

    def run(self) -> int:
        """Everything that is not done yet; 0, 1 if a run failed or is busy elsewhere, 130 interrupted.

        Raises:
            ConfigError: a folder holds another run, or there are fewer cores than parallel runs.
        """
        cores = share_cores(sorted(os.sched_getaffinity(0)), self.settings.num_parallel)
        gpus = share_gpus(visible_gpus(), self.settings.num_parallel)
        free = [Slot(*parts) for parts in zip(cores, gpus, strict=True)]
        todo = deque(self._todo())
        previous = {number: signal.signal(number, self._interrupt) for number in _SIGNALS}
        try:
            while todo or self._active:
                while free and todo:
                    if self._start(todo.popleft(), free[0]):
                        free.pop(0)
                time.sleep(_POLL_S)
                free += self._collect()
        except KeyboardInterrupt:
            self.say("interrupted: ending all runs; the same command goes on")
            return 130
        finally:
            self._stopping = True
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 1 if self.num_failed else 0

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self._stopping:  # once: ending the runs must not be cut short
            self._stopping = True
            raise KeyboardInterrupt

    def _todo(self) -> list[PlannedRun]:
        """What is left to do, after a look at every folder."""
        left = []
        for run in self.runs:
            state = state_of(run)
            if state == "done":
                self._num_ended += 1
            elif state == "busy":
                self._leave(run)
            else:
                left.append(run)
        if self._num_ended:
            self.say(f"{self._num_ended} of {len(self.runs)} runs were finished before")
        return left

    def _leave(self, run: PlannedRun) -> None:
        self.num_failed += 1
        self.say(f"{run.name}: another process works in {run.run_dir}; left to it")

    def _start(self, run: PlannedRun, slot: Slot) -> bool:
        """Start the run if that is still to be done; returns whether it has the slot."""
        lock = take_run(self.settings.folder, run.name)
        if lock is None:
            self._leave(run)
            return False
        try:
            state = state_of(run)
        except ConfigError as error:  # another sweep's, begun meanwhile
            self.num_failed += 1
            self.say(f"{run.name}: {error}")
            lock.close()
            return False
        if state in ("new", "resume"):
            process = self._spawn(run, slot, resume=state == "resume")
            self._active.append(Active(run, slot, process, time.monotonic(), lock))
            self.say(f"{run.name}: {'resumed' if state == 'resume' else 'started'}")
            return True
        with lock:
            if state == "ended":
                self._finish(run, 0, seconds=seconds_of(run.run_dir))
            elif state == "busy":
                self._leave(run)
            else:
                self._num_ended += 1
                self.say(f"{run.name}: finished by another process meanwhile")
        return False

    def _spawn(self, run: PlannedRun, slot: Slot, *, resume: bool) -> subprocess.Popen[bytes]:
        if not resume:
            clear(run.run_dir)
        run.run_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "asyncrl", *run.command]
        environment = dict(os.environ)
        if slot.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
        pinned = slot.cores if self.settings.num_parallel > 1 else None
        with (run.run_dir / CONSOLE).open("ab") as console:
            return subprocess.Popen(
                [*command, *(["checkpoint.resume=true"] if resume else [])],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches the sweep alone
                preexec_fn=partial(_become_child, os.getpid(), pinned),
            )

    def _collect(self) -> list[Slot]:
        """Take the rows of runs that have ended; their slots are free again."""
        ended = [active for active in self._active if active.process.poll() is not None]
        for active in ended:
            self._active.remove(active)
            seconds = time.monotonic() - active.started_s
            with active.lock:
                self._finish(active.run, active.process.returncode, seconds=seconds)
        return [active.slot for active in ended]

    def _finish(self, run: PlannedRun, code: int, *, seconds: float) -> None:
        """Write the row, then remove what is not kept; a kill in between leaves a run that is done."""
        try:
            row = done_row(run, seconds=seconds) if code == 0 else None
            cause = "" if row else cause_of(run, code)
        except ValueError as error:
            row, cause = None, str(error)
        self._num_ended += 1
        place = f"[{self._num_ended}/{len(self.runs)}] {run.name}"
        if row is None:
            self.num_failed += 1
            write_row(run.run_dir, failed_row(run, cause, seconds=seconds))
            self.say(f"{place} FAILED after {seconds:.0f} s: {cause}")
            return
        write_row(run.run_dir, row)
        prune(run.run_dir, self.settings)
        self.say(f"{place} done in {seconds:.0f} s: {_in_short(row)}")

    def _end_all(self) -> None:
        """SIGTERM to each supervisor, which ends its own; SIGKILL to what does not end."""
        for active in self._active:
            with contextlib.suppress(ProcessLookupError):
                active.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + _GRACE_S
        while any(a.process.poll() is None for a in self._active) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        for active in self._active:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(active.process.pid, signal.SIGKILL)
            active.process.wait()
            active.lock.close()


def _become_child(parent: int, cores: Sequence[int] | None) -> None:
    """In the new process: die with the sweep, and use these cores only."""
    die_with_parent(parent)
    if cores is not None:
        os.sched_setaffinity(0, cores)


def _in_short(row: Row) -> str:
    return f"held-out score {row['final']:.3f}, staleness {row['staleness']['mean']} of {row['k']}"
