"""How a run ends when processes come late, leave others behind, or are not alone in their folder."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.models import make_tiny_model
from tests.process.runs import (
    alive,
    command_of,
    descendants,
    finish,
    records,
    start_run,
    wait_for,
    write_config,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def num_steps(run_dir: Path) -> int:
    return len(records(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


def child(supervisor: int, words: str) -> int:
    return next(pid for pid in descendants(supervisor) if words in command_of(pid))


def has_child(supervisor: int, words: str) -> bool:
    return any(words in command_of(pid) for pid in descendants(supervisor))


def wait_until_dead(family: list[int], *, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [command_of(pid) for pid in family if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_generator_that_starts_too_late_delays_nothing(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_run(
        write_config(tmp_path, model), run_dir, "pipeline.num_generators=2", "pipeline.num_steps=3"
    )
    wait_for(lambda: has_child(process.pid, "--name generator-1"), process)
    os.kill(child(process.pid, "--name generator-1"), signal.SIGSTOP)
    wait_for(lambda: num_steps(run_dir) == 3, process)
    code, output = finish(process, timeout_s=20)
    assert code == 0, output


def test_a_generator_that_fails_after_the_last_step_does_not_fail_the_run(
    model: Path, tmp_path: Path
) -> None:
    """Stopped while the others end, it does not hear that the run is over; then it is killed.

    The stop comes after the last training step, so that the other one evaluates.
    """
    run_dir = tmp_path / "run"
    process = start_run(
        write_config(tmp_path, model), run_dir, "pipeline.num_generators=2", "pipeline.num_steps=30"
    )
    wait_for(lambda: (run_dir / "joined" / "generator-1").exists(), process)
    slow = child(process.pid, "--name generator-1")
    wait_for(lambda: num_steps(run_dir) >= 28, process)
    os.kill(slow, signal.SIGSTOP)
    os.kill(slow, signal.SIGCONT)
    wait_for(lambda: (run_dir / "checkpoints" / "version-000030").exists(), process)
    os.kill(slow, signal.SIGSTOP)
    wait_for(lambda: not has_child(process.pid, "asyncrl learner"), process)
    os.kill(slow, signal.SIGKILL)
    code, output = finish(process, timeout_s=30)
    assert code == 0, output


def test_no_rank_outlives_a_killed_supervisor(model: Path, tmp_path: Path) -> None:
    """torchrun stands between the supervisor and the ranks, and knows nothing of either."""
    run_dir = tmp_path / "run"
    process = start_run(
        write_config(tmp_path, model), run_dir, "pipeline.num_steps=100000", "learner.num_ranks=2"
    )
    wait_for(lambda: num_steps(run_dir) >= 1, process)
    family = descendants(process.pid)
    assert len([pid for pid in family if "asyncrl learner" in command_of(pid)]) == 3  # + torchrun
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until_dead(family)
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    for leftover in Path("/dev/shm").glob(f"asyncrl-{run_id}-*"):
        leftover.unlink()


def is_sleeper(process: Path, seconds: str) -> bool:
    return f"sleep {seconds}" in command_of(int(process.name))


SCORER = """
import subprocess

helper = subprocess.Popen(["sleep", "{seconds}"], start_new_session=True)

def score(prompt, completion, answer):
    return float(len(completion) % 2)
"""


def test_what_a_scorer_started_ends_with_the_run_even_if_its_generator_was_killed(
    model: Path, tmp_path: Path
) -> None:
    seconds = str(100_000 + os.getpid())
    (tmp_path / "scorer.py").write_text(SCORER.format(seconds=seconds))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}:", "answer": "x"}}\n' for i in range(40)))
    run_dir = tmp_path / "run"
    process = start_run(
        write_config(tmp_path, model), run_dir, "pipeline.num_steps=100000",
        "task.kind=jsonl", f'task.path="{data}"', f'task.scorer="{tmp_path}/scorer.py:score"',
    )  # fmt: skip
    wait_for(lambda: num_steps(run_dir) >= 1, process)
    helper = child(process.pid, f"sleep {seconds}")
    os.kill(child(process.pid, "asyncrl generator"), signal.SIGKILL)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process, timeout_s=20)
    assert code == 130, output
    assert not alive(helper)
    sleepers = [path for path in Path("/proc").glob("[0-9]*") if is_sleeper(path, seconds)]
    assert not sleepers  # nor does one that the scorer started while the settings were checked


def test_ctrl_c_while_a_failed_run_is_stopped_does_not_cut_that_short(
    model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start_run(write_config(tmp_path, model), run_dir, "pipeline.num_steps=100000")
    wait_for(lambda: num_steps(run_dir) >= 1, process)
    family = descendants(process.pid)
    # Stopped, it does not answer SIGTERM: stopping takes until SIGKILL.
    os.kill(child(process.pid, "asyncrl generator"), signal.SIGSTOP)
    os.kill(child(process.pid, "asyncrl learner"), signal.SIGKILL)
    time.sleep(1.5)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process, timeout_s=20)
    assert code == 1, output
    assert "FAILED: learner: killed by SIGKILL" in output
    assert "Traceback" not in output
    assert not [pid for pid in family if alive(pid)]
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    assert not list(Path("/dev/shm").glob(f"asyncrl-{run_id}-*"))


def test_a_folder_in_which_a_run_works_is_refused_also_to_a_resume(
    model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, model)
    overrides = ("pipeline.num_steps=100000", "checkpoint.every_steps=1")
    process = start_run(config, run_dir, *overrides)
    wait_for(lambda: num_steps(run_dir) >= 2, process)
    code, output = finish(
        start_run(config, run_dir, *overrides, "checkpoint.resume=true"), timeout_s=90
    )
    assert code == 2, output
    assert "in use by a run that has not ended" in output
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert finish(process, timeout_s=60)[0] == 130


def test_a_missing_shared_key_is_named_before_anything_starts(model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    code, output = finish(
        start_run(write_config(tmp_path, model), tmp_path / "run", f'broker.token_path="{key}"'),
        timeout_s=30,
    )
    assert code == 2, output
    assert str(key) in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_learner_that_fails_is_named_with_its_own_words(model: Path, tmp_path: Path) -> None:
    """It tells the broker before it has ended itself; the broker's end must not be the cause."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").write_text("a file where a folder should be")
    code, output = finish(
        start_run(write_config(tmp_path, model), run_dir, "checkpoint.every_steps=2"), timeout_s=60
    )
    assert code == 1, output
    assert "FAILED: learner: CheckpointError: version 2 could not be saved" in output
    # What other hosts see of it.
    assert "CheckpointError: version 2" in (run_dir / "logs" / "broker.log").read_text()
