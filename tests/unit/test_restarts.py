"""Which processes a supervisor starts again: those whose failure need not repeat itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl import attempt
from asyncrl.child import Child
from asyncrl.config import RunConfig, read_config
from asyncrl.mps import PIPES, GpuSharing
from asyncrl.supervise import Supervisor
from tests.unit.nvidia_mps import install


@pytest.fixture
def supervisor(tmp_path):
    """Broker and learner are alive, a generator has failed before it joined."""
    (tmp_path / "errors").mkdir()
    made = Supervisor(read_config(Path("launch/smoke.toml")), tmp_path, "run", lambda text: None)
    for name in ("broker", "learner", "generator-0"):
        made._children[name] = Child(name, [], [0], None, 2)
    alive = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for name, process in zip(("broker", "learner"), alive, strict=True):
        made._children[name].process = process
    yield made
    for process in alive:
        process.kill()
        process.wait()


def fails_with(supervisor, kind, code=1):
    record = {"type": kind, "message": "why", "time_s": 1.0}
    (supervisor.run_dir / "errors" / "generator-0.json").write_text(json.dumps(record))
    return supervisor._may_restart(supervisor._children["generator-0"], code)


def test_a_fault_of_the_gpu_before_joining_is_tried_again(supervisor):
    assert fails_with(supervisor, "DeviceError")


@pytest.mark.parametrize(
    ("kind", "code"), [("RuntimeError", 1), ("ConfigError", 2), ("WeightMismatchError", 1)]
)
def test_other_failures_before_joining_are_not(supervisor, kind, code):
    assert not fails_with(supervisor, kind, code)


def test_tries_are_counted(supervisor):
    supervisor._children["generator-0"].restarts_left = 0
    assert not fails_with(supervisor, "DeviceError")


def test_a_generator_that_had_joined_is_started_again(supervisor):
    supervisor._children["generator-0"].joined = True
    assert fails_with(supervisor, "RuntimeError")
    assert not fails_with(supervisor, "WeightMismatchError")


def test_an_engine_whose_mps_daemon_is_gone_gets_its_gpu_by_the_hosts_name(
    supervisor, tmp_path, monkeypatch
):
    """A client calls it 0; without a daemon that is another GPU, perhaps somebody else's."""
    install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPES, raising=False)
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "task": {"kind": "repeat_letter"}}
        | {"engine": {"kind": "vllm", "engines_per_gpu": 2}}
    )
    run_dir, child = supervisor.run_dir, supervisor._children["generator-0"]
    sharing = supervisor._sharing = GpuSharing(config, ["4", "5"], run_dir / "logs", print)
    child.gpus, child.environment = ["5"], sharing.environment(["5"])
    daemon, _ = json.loads(Path(child.environment[PIPES], "control").read_text())
    show = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(60)"
    child.command = [sys.executable, "-c", show]
    log = run_dir / "logs" / "generator-0.log"

    def shown(num_lines):
        deadline_s = time.monotonic() + 30
        while not log.exists() or len(log.read_text().split()) < num_lines:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        return log.read_text().split()

    child.spawn(run_dir, pin=False)
    assert shown(1) == ["0"]
    child.joined = True
    os.kill(daemon, signal.SIGKILL)
    while sharing._daemons["5",]._process.poll() is None:
        time.sleep(0.01)
    child.signal_session(signal.SIGKILL)
    child.process.wait()
    supervisor._check_children()
    assert shown(2) == ["0", "5"]
    child.signal_session(signal.SIGKILL)
    child.process.wait()
    sharing.close()


def test_a_restart_is_on_record_with_its_cause_over_all_attempts(supervisor):
    run_dir, child = supervisor.run_dir, supervisor._children["generator-0"]
    child.command = [sys.executable, "-c", "import time; time.sleep(60)"]
    for number in (signal.SIGKILL, signal.SIGTERM):
        attempt.begin(run_dir, supervisor.config)
        child.spawn(run_dir, pin=False)
        child.joined = True
        child.process.send_signal(number)
        child.process.wait()
        supervisor._check_children()
        assert child.process.poll() is None
        child.signal_session(signal.SIGKILL)
        child.process.wait()
        attempt.end(run_dir, "failed", started_s=time.monotonic())
    first, second = json.loads((run_dir / "summary.json").read_text())["restarts"]
    assert first["process"] == second["process"] == "generator-0"
    assert first["cause"].startswith("killed by SIGKILL (by somebody, or by the kernel")
    assert second["cause"].startswith("killed by SIGTERM")
    assert first["time"] <= second["time"]


def test_a_restart_that_cannot_be_recorded_ends_nothing(tmp_path):
    (tmp_path / "restarts.jsonl").symlink_to("/dev/full")  # ENOSPC at each write
    attempt.keep_restart(tmp_path, "generator-0", "generator-0: killed by SIGKILL")
