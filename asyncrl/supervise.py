"""Starts the processes of a run on this host, watches them, and ends them all.

Invariants: no child outlives the supervisor (each asks the kernel to be killed with its parent); the
first failure names the run's cause, every later one is a consequence; a generator may be restarted, a
broker or learner that fails ends the run. Exit codes: 0 done, 1 failed, 130 interrupted.
"""

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.errors import AsyncRLError, PeerLostError
from asyncrl.placement import count_gpus, plan_cores
from asyncrl.telemetry.console import Follower, eval_line, step_line

log = logging.getLogger(__name__)

_POLL_S = 0.2
_TERMINATE_S = 4.0
"""Between SIGTERM and SIGKILL; with reaping it keeps the end of a run under 10 s."""

_FINISH_S = 30.0
"""After the learner is done, the others have this long to end by themselves."""


@dataclass(slots=True)
class Child:
    """One process of the run."""

    name: str
    command: list[str]
    cores: list[int]
    gpus: list[int] | None
    restarts_left: int
    incarnation: int = 0
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    joined: bool = False
    finished: bool = False


@dataclass(slots=True)
class Supervisor:
    """Runs one configuration to its end."""

    config: RunConfig
    run_dir: Path
    say: Callable[[str], None]
    run_id: str = field(default_factory=lambda: secrets.token_hex(6))
    _children: dict[str, Child] = field(default_factory=dict)
    _interrupted: bool = False

    def run(self) -> int:
        """Start everything, wait for the end, stop everything; returns the exit code."""
        previous = {
            number: signal.signal(number, self._interrupt)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            self._start_all()
            self._watch()
            return 0
        except KeyboardInterrupt:
            self.say("interrupted: stopping all processes")
            return 130
        except AsyncRLError as error:
            self.say(f"FAILED: {error}")
            return 1
        finally:
            self._stop_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt

    def _start_all(self) -> None:
        plan = plan_cores(self.config, sorted(os.sched_getaffinity(0)), num_gpus=count_gpus())
        token = self.run_dir / "token"
        write_private(token, self._token())
        common = [
            str(self.run_dir / "config.toml"), "--run-dir", str(self.run_dir),
            "--run-id", self.run_id, "--token-file", str(token), "--supervised",
        ]  # fmt: skip
        address_file = self.run_dir / "broker.json"
        address_file.unlink(missing_ok=True)
        self._start("broker", ["broker", *common], plan.broker, gpus=[])
        endpoint = self._await_broker(address_file)
        self._start(
            "learner",
            ["learner", *common, "--broker", endpoint],
            plan.learner,
            gpus=plan.learner_gpus,
            num_ranks=self.config.learner.num_ranks,
        )
        for index in range(self.config.pipeline.num_generators):
            name = f"generator-{index}"
            self._start(
                name,
                ["generator", *common, "--broker", endpoint, "--name", name],
                plan.generators[index],
                gpus=plan.generator_gpus[index],
                restarts=self.config.host.max_generator_restarts,
            )

    def _token(self) -> str:
        path = self.config.broker.token_path
        return Path(path).read_text().strip() if path else secrets.token_hex(16)

    def _start(
        self,
        name: str,
        arguments: list[str],
        cores: list[int],
        *,
        gpus: list[int] | None,
        restarts: int = 0,
        num_ranks: int = 1,
    ) -> None:
        launcher = [sys.executable, "-m"]
        if num_ranks > 1:
            launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
            launcher += ["-m"]
        child = Child(name, [*launcher, "asyncrl", *arguments], cores, gpus, restarts)
        self._children[name] = child
        self._spawn(child)

    def _spawn(self, child: Child) -> None:
        for stale in (self._error_file(child), self._joined_file(child)):
            stale.unlink(missing_ok=True)
        environment = os.environ | {
            "OMP_NUM_THREADS": str(len(child.cores)),
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if child.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, child.gpus))
        log_path = self.run_dir / "logs" / f"{child.name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log_file:
            again = ["--incarnation", str(child.incarnation)] if child.incarnation else []
            child.process = subprocess.Popen(
                [*child.command, *again],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone
            )
        child.started_s = time.monotonic()
        child.joined = False
        if self.config.host.pin_cores:
            with contextlib.suppress(ProcessLookupError):  # it may have failed already
                os.sched_setaffinity(child.process.pid, child.cores)

    def _await_broker(self, address_file: Path) -> str:
        deadline_s = time.monotonic() + self.config.host.start_timeout_s
        while not address_file.exists():
            self._check_children()
            if time.monotonic() > deadline_s:
                raise PeerLostError(
                    f"the broker did not start within host.start_timeout_s="
                    f"{self.config.host.start_timeout_s}; see {self.run_dir}/logs/broker.log"
                )
            time.sleep(0.02)
        endpoint: str = json.loads(address_file.read_text())["endpoint"]
        return endpoint

    def _watch(self) -> None:
        """Show progress until the learner has finished and everybody has gone home."""
        steps = Follower(self.run_dir / "metrics.jsonl")
        evals = Follower(self.run_dir / "evals.jsonl")
        if self.config.checkpoint.resume:
            list(steps.new()), list(evals.new())  # what earlier attempts printed
        finish_by_s = float("inf")
        while not all(child.finished for child in self._children.values()):
            self._check_children()
            self._check_joined()
            self._show(steps, evals)
            if self._children["learner"].finished and finish_by_s == float("inf"):
                finish_by_s = time.monotonic() + _FINISH_S
            if time.monotonic() > finish_by_s:
                late = [child.name for child in self._children.values() if not child.finished]
                log.warning("still running %s s after the end: %s", _FINISH_S, ", ".join(late))
                break
            time.sleep(_POLL_S)
        self._show(steps, evals)

    def _show(self, steps: Follower, evals: Follower) -> None:
        for record in evals.new():
            self.say(eval_line(record))
        for record in steps.new():
            self.say(
                step_line(
                    record,
                    num_steps=self.config.pipeline.num_steps,
                    max_staleness=self.config.pipeline.max_staleness,
                )
            )

    def _check_children(self) -> None:
        """Restart what may be restarted; raise for the first failure that ends the run."""
        for child in self._children.values():
            if child.finished or child.process is None or (code := child.process.poll()) is None:
                continue
            if code == 0:
                child.finished = True
            elif self._may_restart(child, code):
                child.restarts_left -= 1
                child.incarnation += 1
                self.say(f"{self._cause(child, code)}; restarting it")
                self._spawn(child)
            else:
                raise PeerLostError(self._root_cause(child, code))

    def _may_restart(self, child: Child, code: int) -> bool:
        """A generator that had joined; one that fails before, or of its settings, would fail again."""
        joined = child.joined or self._joined_file(child).exists()
        return child.restarts_left > 0 and joined and code != 2 and self._stops_alone()

    def _stops_alone(self) -> bool:
        """Whether broker and learner are running: else its end is a consequence, not a cause."""
        others = (self._children[name] for name in ("broker", "learner"))
        return all(o.process is not None and o.process.poll() is None for o in others)

    def _root_cause(self, child: Child, code: int) -> str:
        """The earliest recorded error: a peer that lost its partner is only the messenger."""
        time.sleep(_POLL_S)  # the partner may be writing its error at this moment
        found = [(child, code)]
        for other in self._children.values():
            status = (other.process.poll() if other.process is not None else None) or 0
            # One that recorded its error may take a second to exit.
            if other is not child and (status > 0 or self._error(other) is not None):
                found.append((other, status))
        culprit, status = min(
            found,
            key=lambda item: (
                (error := self._error(item[0])) is None,
                error is not None and error["type"] == "PeerLostError",
                error["time_s"] if error is not None else 0.0,
            ),
        )
        return self._cause(culprit, status)

    def _cause(self, child: Child, code: int) -> str:
        error = self._error(child)
        if error is not None:
            what = f"{error['type']}: {error['message']}"
        elif code < 0:
            what = f"killed by {signal.Signals(-code).name}"
        else:
            what = f"exit code {code}"
        return f"{child.name}: {what} (log: {self.run_dir}/logs/{child.name}.log)"

    def _error_file(self, child: Child) -> Path:
        return self.run_dir / "errors" / f"{child.name}.json"

    def _error(self, child: Child) -> dict[str, Any] | None:
        path = self._error_file(child)
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return found

    def _joined_file(self, child: Child) -> Path:
        return self.run_dir / "joined" / child.name

    def _check_joined(self) -> None:
        limit_s = self.config.host.start_timeout_s
        for child in self._children.values():
            if child.joined or child.finished or child.name == "broker":
                continue
            child.joined = self._joined_file(child).exists()
            if not child.joined and time.monotonic() > child.started_s + limit_s:
                raise PeerLostError(
                    f"{child.name} did not join within host.start_timeout_s={limit_s}; "
                    f"see {self.run_dir}/logs/{child.name}.log"
                )

    def _stop_all(self) -> None:
        """SIGTERM, then SIGKILL, to each child's whole session; then remove shared memory."""
        alive = [c for c in self._children.values() if c.process and c.process.poll() is None]
        for child in alive:
            signal_session(child, signal.SIGTERM)
        deadline_s = time.monotonic() + _TERMINATE_S
        while any(c.process and c.process.poll() is None for c in alive):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
        for child in self._children.values():
            signal_session(child, signal.SIGKILL)
            if child.process is not None:
                child.process.wait()
        for left in Path("/dev/shm").glob(f"asyncrl-{self.run_id}-*"):
            left.unlink(missing_ok=True)


def signal_session(child: Child, number: signal.Signals) -> None:
    """Signal a child's whole session: torchrun's ranks and scoring workers included."""
    if child.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
