"""Runs whose processes are started one by one: the learner leaves what a supervisor would."""

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from asyncrl.config import read_config
from asyncrl.report.page import write_report
from asyncrl.report.verdict import read_verdict
from tests.models import make_tiny_model
from tests.process.runs import finish, records, wait_for, write_config

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_config(folder, make_tiny_model(folder / "tiny"))


def start(role: str, config: Path, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "asyncrl", role, str(config), *arguments, "--run-dir", str(run_dir),
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        # Where the tests run in the background, SIGINT is ignored, and its children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def start_all(
    config: Path, run_dir: Path, run_id: str, *overrides: str
) -> dict[str, subprocess.Popen[str]]:
    """Broker, learner and generator, in one folder."""
    address = run_dir / "broker.json"
    address.unlink(missing_ok=True)
    broker = start("broker", config, run_dir, *overrides, "--run-id", run_id)
    wait_for(address.exists, broker)
    endpoint = json.loads(address.read_text())["endpoint"]
    common = [*overrides, "--broker", endpoint, "--run-id", run_id]
    others = {role: start(role, config, run_dir, *common) for role in ("learner", "generator")}
    return {"broker": broker, **others}


def read(run_dir: Path, name: str) -> dict:
    return json.loads((run_dir / f"{name}.json").read_text())


def test_a_run_by_hand_leaves_how_it_began_and_ended(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for attempt, num_steps in enumerate((2, 4)):
        overrides = [f"pipeline.num_steps={num_steps}"]
        overrides += ["checkpoint.resume=true"] if attempt else []
        processes = start_all(config, run_dir, f"id{attempt}", *overrides)
        ends = {role: finish(process) for role, process in processes.items()}
        assert [code for code, _ in ends.values()] == [0, 0, 0], ends
        assert read_verdict(run_dir).state == "done"
        summary = read(run_dir, "summary")
        assert (summary["outcome"], summary["steps"]) == ("done", num_steps)
    begun = read(run_dir, "run")
    assert (begun["run_id"], begun["earlier"]["run_id"]) == ("id1", "id0")  # as each broker's
    assert begun["versions"]["python"]
    assert "learner" in begun["command"]
    assert read_config(run_dir / "config.toml").pipeline.num_steps == 4
    others = [
        "seed=9",
        "checkpoint.resume=true",
        "--broker",
        "tcp://127.0.0.1:9",
        "--run-id",
        "id2",
    ]
    code, output = finish(start("learner", config, run_dir, "pipeline.num_steps=8", *others))
    assert (code, "seed: 0 there, 9 here" in output) == (2, True), output
    assert read(run_dir, "run") == begun  # the folder of a run that is not this one
    report = write_report(run_dir, tmp_path / "report.html", budget_bytes=2**20)
    assert report["run"]["summary"]["outcome"] == "done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_by_hand_is_that_and_its_folder_was_its_own(
    config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    processes = start_all(config, run_dir, "id", "pipeline.num_steps=100000")
    steps = run_dir / "metrics.jsonl"
    wait_for(lambda: steps.exists() and len(records(run_dir)) >= 1, processes["learner"])
    assert read_verdict(run_dir).state == "running"
    second = start("learner", config, run_dir, "--broker", "tcp://127.0.0.1:9", "--run-id", "id")
    code, output = finish(second)
    assert (code, "is in use by a run that has not ended" in output) == (2, True), output
    processes["learner"].send_signal(number)
    ends = {role: finish(process) for role, process in processes.items()}
    # The others lost the learner, and say so in errors/, which is no cause.
    assert read_verdict(run_dir).state == "interrupted", ends
    assert read(run_dir, "summary")["steps"] == len(records(run_dir))


def test_a_learner_by_hand_that_fails_leaves_why(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, output = finish(
        start(
            "learner", config, run_dir, "model.path=models/none",
            "--broker", "tcp://127.0.0.1:9", "--run-id", "id",
        )
    )  # fmt: skip
    assert code != 0, output
    verdict = read_verdict(run_dir)
    assert verdict.state == "failed"
    assert "models/none" in verdict.text
    assert "log:" not in verdict.text  # the terminal has it
    assert read(run_dir, "summary")["outcome"] == "failed"


@pytest.mark.parametrize(
    ("role", "setting", "run_id", "said"),
    [
        ("learner", "seed=0", "other", "'other'"),
        ("generator", "seed=0", "other", "'other'"),
        ("generator", "seed=9", "id", "config has digest"),
    ],
)
def test_who_belongs_to_another_run_is_told_so_in_a_sentence(
    config: Path, tmp_path: Path, role: str, setting: str, run_id: str, said: str
) -> None:
    run_dir = tmp_path / "run"
    broker = start("broker", config, run_dir, "seed=0", "--run-id", "id")
    address = run_dir / "broker.json"
    try:
        wait_for(address.exists, broker)
        endpoint = json.loads(address.read_text())["endpoint"]
        place = tmp_path / role
        peer = start(role, config, place, setting, "--broker", endpoint, "--run-id", run_id)
        code, output = finish(peer)
    finally:
        broker.kill()
        broker.communicate()
    assert code == 1, output
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert f"failed: refused by {endpoint}" in last
    assert said in last
