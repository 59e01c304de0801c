"""Starts the processes of a run on this host, watches them, and ends them all.

Invariants: no process of the run outlives the supervisor (family.py); the first failure names the
run's cause, every later one is a consequence; a generator may be restarted, a broker or learner that
fails ends the run; once the learner has ended well the run is done, whatever happens to the others.
Exit codes: 0 done, 1 failed, 2 failed because of a setting, 130 interrupted.
"""

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from asyncrl.attempt import keep_restart
from asyncrl.causes import cause, is_device_fault, is_known, is_mismatch, root_cause
from asyncrl.child import Child, stop
from asyncrl.config import RunConfig, to_toml
from asyncrl.errors import AsyncRLError, ConfigError, PeerLostError
from asyncrl.family import children, inherit_orphans, kill_orphans
from asyncrl.generator.choice import settled
from asyncrl.mps import GpuSharing
from asyncrl.placement import gpu_split, plan_cores, visible_gpus
from asyncrl.run_folder import add_facts, read_key, write_private
from asyncrl.telemetry.bottleneck import Split
from asyncrl.telemetry.console import Follower, eval_line, step_line
from asyncrl.weights.buffers import remove_leftovers

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: a terminal was closed

_POLL_S = 0.2
_LAST_WORDS_S = 5.0
"""A process that failed has this long to end, once another one has said that it lost it."""

_FINISH_S = 30.0
"""After the learner is done, the others have this long to end by themselves."""


@dataclass(slots=True)
class Supervisor:
    """Runs one configuration to its end."""

    config: RunConfig
    run_dir: Path
    run_id: str
    say: Callable[[str], None]
    failure: str = ""  # why the run failed
    _children: dict[str, Child] = field(default_factory=dict)
    _stopping: bool = False
    _split: Split | None = None
    _sharing: GpuSharing | None = None

    def run(self) -> int:
        """Start everything, wait for the end, stop everything; returns the exit code."""
        previous = {number: signal.signal(number, self._interrupt) for number in _SIGNALS}
        others = children(os.getpid())
        try:
            inherit_orphans()
            if self.config.must_probe:
                self._settle_engines()
            self._start_all()
            self._watch()
            return 0
        except KeyboardInterrupt:
            self.say("interrupted: stopping all processes")
            return 130
        except (AsyncRLError, OSError) as error:
            self._stopping = True
            self.failure = str(error)
            self.say(f"FAILED: {error}")
            return 2 if isinstance(error, ConfigError) else 1
        finally:
            self._stopping = True
            self._stop_all()
            if left := kill_orphans(others):
                self.say(f"could not be killed: processes {sorted(left)}")
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self._stopping:  # stopping takes seconds, and a second Ctrl-C must not cut it short
            self._stopping = True
            raise KeyboardInterrupt

    def _start_all(self) -> None:
        remove_leftovers(self.run_id)  # of an attempt whose supervisor was killed
        gpus = visible_gpus()
        plan = plan_cores(self.config, sorted(os.sched_getaffinity(0)), gpus=gpus)
        self._sharing = GpuSharing(self.config, gpus, self.run_dir / "logs", self.say)
        environments = [self._sharing.environment(place) for place in plan.generator_gpus]
        self._split = gpu_split(plan)
        add_facts(
            self.run_dir,
            gpu_split=asdict(self._split) if self._split else None,
            mps=self._sharing.is_on,
        )
        token = self.run_dir / "token"
        write_private(token, self._token())
        common = [
            str(self.run_dir / "config.toml"),
            f"checkpoint.resume={str(self.config.checkpoint.resume).lower()}",
            "--run-dir", str(self.run_dir), "--run-id", self.run_id,
            "--token-file", str(token), "--supervised",
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
        for index in range(self.config.num_engines):
            name = f"generator-{index}"
            is_first = index % self.config.engines_per_place == 0
            self._start(
                name,
                ["generator", *common, "--broker", endpoint, "--name", name],
                plan.generators[index],
                gpus=plan.generator_gpus[index],
                restarts=self.config.host.max_generator_restarts,
                after=None if is_first else self._children[f"generator-{index - 1}"],
                environment=environments[index],
            )

    def _settle_engines(self) -> None:
        """Have "auto" measured by a process that leaves nothing on the GPU; go on with the number."""
        settings = self.run_dir / "config.toml"
        plan = plan_cores(self.config, sorted(os.sched_getaffinity(0)), gpus=visible_gpus())
        arguments = ["probe", str(settings), "--run-dir", str(self.run_dir), "--supervised"]
        self._start("probe", arguments, plan.generators[0], gpus=plan.generator_gpus[0])
        probe = self._children["probe"]
        if code := probe.wait(limit_s=self.config.host.start_timeout_s):
            raise self._root_cause(probe, code)
        del self._children["probe"]
        record = json.loads((self.run_dir / "probe.json").read_text())
        self.say(record["sentence"])
        self.config = settled(self.config, record)
        settings.write_text(to_toml(self.config.without_resume()))

    def _token(self) -> str:
        path = self.config.broker.token_path
        return read_key(Path(path)) if path else secrets.token_hex(16)

    def _start(
        self,
        name: str,
        arguments: list[str],
        cores: list[int],
        *,
        gpus: list[str] | None,
        restarts: int = 0,
        num_ranks: int = 1,
        after: Child | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        launcher = [sys.executable, "-m"]
        if num_ranks > 1:
            launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
            launcher += ["-m"]
        child = Child(name, [*launcher, "asyncrl", *arguments], cores, gpus, restarts, after)
        child.environment = environment or {}
        self._children[name] = child
        if after is None:
            child.spawn(self.run_dir, pin=self.config.host.pin_cores)

    def _start_waiting(self) -> None:
        """Start the engines whose turn has come; nobody starts any more at the end."""
        for child in self._children.values():
            if not self._is_done and child.may_start(time.monotonic()):
                child.spawn(self.run_dir, pin=self.config.host.pin_cores)

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
            self._start_waiting()
            self._show(steps, evals)
            if self._is_done and finish_by_s == float("inf"):
                finish_by_s = time.monotonic() + _FINISH_S
            if time.monotonic() > finish_by_s or self._all_home:
                break
            time.sleep(_POLL_S)
        self._show(steps, evals)

    @property
    def _is_done(self) -> bool:
        """Whether the learner has ended well: everything is trained, evaluated and saved."""
        return self._children["learner"].finished

    @property
    def _all_home(self) -> bool:
        """Whether nobody is left who could say goodbye: a generator that starts finds no broker."""
        return (
            self._is_done
            and self._children["broker"].finished
            and not any(c.joined and not c.finished for c in self._children.values())
        )

    def _show(self, steps: Follower, evals: Follower) -> None:
        for record in evals.new():
            self.say(eval_line(record))
        for record in steps.new():
            self.say(step_line(record, self.config.pipeline, self._split))

    def _check_children(self) -> None:
        """Restart what may be restarted; raise for the first failure that ends the run."""
        if self._sharing is not None:
            self._sharing.check()
        for child in self._children.values():
            if child.finished or child.process is None or (code := child.process.poll()) is None:
                continue
            if code == 0:
                child.finished = True
            elif child.name != "learner" and self._children.get("learner", child).finished:
                self.say(f"after the end: {cause(self.run_dir, child.name, code)}")
                child.finished = True
            elif self._may_restart(child, code):
                child.restarts_left -= 1
                child.incarnation += 1
                why = cause(self.run_dir, child.name, code)
                keep_restart(self.run_dir, child.name, why)
                self.say(f"{why}; restarting it")
                child.spawn(self.run_dir, pin=self.config.host.pin_cores)
            else:
                raise self._root_cause(child, code)

    def _may_restart(self, child: Child, code: int) -> bool:
        """A generator that had joined, or failed in its GPU; else one that fails early fails again.

        So would one that got other weights than the learner's, and what it sampled meanwhile is suspect.
        """
        joined = child.joined or child.joined_file(self.run_dir).exists()
        again = code == 2 or is_mismatch(self.run_dir, child.name)
        hopeful = joined or is_device_fault(self.run_dir, child.name)
        return child.restarts_left > 0 and hopeful and not again and self._stops_alone()

    def _stops_alone(self) -> bool:
        """Whether broker and learner are running: else its end is a consequence, not a cause."""
        others = (self._children[name] for name in ("broker", "learner"))
        return all(o.process is not None and o.process.poll() is None for o in others)

    def _root_cause(self, child: Child, code: int) -> AsyncRLError:
        """The first failure; a partner that only lost its peer waits for that peer's own words."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        ended = {child.name: code}
        while True:
            time.sleep(_POLL_S)  # who failed first may be writing its error at this moment
            for other in self._children.values():
                if other.process is not None and other.process.poll():
                    ended[other.name] = other.process.returncode
            if is_known(self.run_dir, ended.items()) or time.monotonic() > deadline_s:
                text = root_cause(self.run_dir, ended.items())
                return ConfigError(text) if 2 in ended.values() else PeerLostError(text)

    def _check_joined(self) -> None:
        limit_s = self.config.host.start_timeout_s
        for child in self._children.values():
            if child.process is None or child.joined or child.finished or child.name == "broker":
                continue
            child.joined = child.joined_file(self.run_dir).exists()
            if not child.joined and time.monotonic() > child.started_s + limit_s:
                raise PeerLostError(
                    f"{child.name} did not join within host.start_timeout_s={limit_s}; "
                    f"see {self.run_dir}/logs/{child.name}.log"
                )

    def _stop_all(self) -> None:
        """End every process; then remove shared memory."""
        stop(self._children.values())
        if self._sharing is not None:
            self._sharing.close()
        remove_leftovers(self.run_id)
