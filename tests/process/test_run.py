"""Whole runs with real processes on loopback."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from asyncrl.report.verdict import read_verdict
from tests.models import make_tiny_model
from tests.process.runs import (
    Finished,
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

LEDGER_PARTS = ("trained", "dropped_stale", "dropped_filtered", "failed", "queued", "in_flight")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def assert_books_close(steps: list[dict]) -> None:
    for record in steps:
        parts = sum(record[f"ledger/{name}"] for name in LEDGER_PARTS)
        assert parts == record["ledger/admitted"], record


@pytest.mark.parametrize("k", [0, 1, 4])
def test_no_trained_token_is_older_than_k_and_the_ledger_balances(
    model: Path, tmp_path: Path, k: int
) -> None:
    # F091.
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, model)
    code, output = finish(start_run(config, run_dir, f"pipeline.max_staleness={k}"))
    assert code == 0, output
    summary = assert_none_is_older_than(run_dir, k)
    if k == 0:
        # Synchronous training through the same code: the two sides are never busy together.
        assert summary["both_busy_s"] == 0.0
        assert all(record["staleness/max"] == 0 for record in records(run_dir))


def test_no_trained_token_is_older_than_2_and_both_sides_were_busy_together(
    finished: Finished,
) -> None:
    # F091.
    assert assert_none_is_older_than(finished.run_dir, 2)["both_busy_s"] > 0.0


def assert_none_is_older_than(run_dir: Path, k: int) -> dict:
    """Of runs.CONFIG's steps, groups and rollouts, all of which are on record; the summary."""
    steps = records(run_dir)
    assert [record["step"] for record in steps] == list(range(8))
    assert max(record["staleness/max"] for record in steps) <= k
    assert_books_close(steps)
    assert steps[-1]["ledger/trained"] == 8 * 4  # num_steps * groups_per_step
    rollouts = records(run_dir, "rollouts")
    assert len(rollouts) == 8 * 4 * 4  # and group_size
    for rollout in rollouts:
        oldest = rollout["version_spans"][0][0]
        assert 0 <= rollout["step"] - oldest <= k
    assert [record["version"] for record in records(run_dir, "evals")] == [0, 8]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "done"
    return summary


def test_k_holds_while_a_generator_is_stopped_and_continued(model: Path, tmp_path: Path) -> None:
    """Two generators, one of them frozen by SIGSTOP for a while, again and again."""
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, model)
    process = start_run(
        config, run_dir, "pipeline.num_generators=2", "pipeline.max_staleness=1",
        "pipeline.num_steps=150",
    )  # fmt: skip
    done = threading.Event()

    def disturb() -> None:
        while not done.wait(0.1):
            if not (run_dir / "joined" / "generator-1").exists():
                continue
            slow = [p for p in descendants(process.pid) if "generator-1" in command_of(p)]
            for pid in slow:
                try:
                    os.kill(pid, signal.SIGSTOP)
                    done.wait(0.3)
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        code, output = finish(process)
    finally:
        done.set()
        thread.join()
    assert code == 0, output
    steps = records(run_dir)
    assert len(steps) == 150
    assert max(record["staleness/max"] for record in steps) <= 1
    assert_books_close(steps)
    names = {rollout["generator"] for rollout in records(run_dir, "rollouts")}
    assert names == {"generator-0", "generator-1"}


def test_a_killed_generator_is_restarted_and_no_group_is_lost(model: Path, tmp_path: Path) -> None:
    # F024.
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, model)
    process = start_run(config, run_dir, "pipeline.num_steps=30")
    wait_for(lambda: num_steps(run_dir) >= 3, process)
    victim = next(p for p in descendants(process.pid) if "asyncrl generator" in command_of(p))
    os.kill(victim, signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    _, killed, later = output.partition("generator-0: killed by SIGKILL")
    assert killed, output
    assert "generators start up" in later  # meanwhile the learner waits
    (restart,) = json.loads((run_dir / "summary.json").read_text())["restarts"]
    assert (restart["process"], restart["cause"][:17]) == ("generator-0", "killed by SIGKILL")
    assert kept_lines(run_dir) == output.splitlines()
    steps = records(run_dir)
    assert len(steps) == 30
    assert_books_close(steps)
    ordinals = [rollout["ordinal"] for rollout in records(run_dir, "rollouts")]
    assert sorted(set(ordinals)) == list(range(30 * 4))  # each prompt trained
    assert all(ordinals.count(o) == 4 for o in set(ordinals))  # and exactly once (group_size rows)


@pytest.mark.parametrize("role", ["learner", "broker"])
def test_a_killed_learner_or_broker_ends_the_run_with_its_name(
    model: Path, tmp_path: Path, role: str
) -> None:
    run_dir = tmp_path / "run"
    process = start_run(write_config(tmp_path, model), run_dir, "pipeline.num_steps=100000")
    wait_for(lambda: num_steps(run_dir) >= 2, process)
    victim = next(p for p in descendants(process.pid) if f"asyncrl {role}" in command_of(p))
    family = [process.pid, *descendants(process.pid)]
    os.kill(victim, signal.SIGKILL)
    code, output = finish(process, timeout_s=60)
    assert code == 1, output
    assert f"FAILED: {role}: killed by SIGKILL" in output
    verdict = read_verdict(run_dir)
    assert verdict.state == "failed"
    assert verdict.text.startswith(f"{role}: killed by SIGKILL")
    assert not [pid for pid in family if alive(pid)]


def test_ctrl_c_ends_everything_within_ten_seconds(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_run(write_config(tmp_path, model), run_dir, "pipeline.num_steps=100000")
    wait_for(lambda: num_steps(run_dir) >= 1, process)
    family = descendants(process.pid)
    assert len(family) >= 4  # broker, learner, generator, scoring worker
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process, timeout_s=10)
    assert code == 130, output
    assert not [pid for pid in family if alive(pid)]
    assert not list(Path("/dev/shm").glob(f"asyncrl-{run_id}-*"))


def test_no_process_outlives_a_killed_supervisor(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_run(write_config(tmp_path, model), run_dir, "pipeline.num_steps=100000")
    wait_for(lambda: num_steps(run_dir) >= 1, process)
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in family):
        assert time.monotonic() < deadline, [command_of(pid) for pid in family if alive(pid)]
        time.sleep(0.1)
    for leftover in Path("/dev/shm").glob(
        f"asyncrl-{json.loads((run_dir / 'run.json').read_text())['run_id']}-*"
    ):
        leftover.unlink()


def test_a_resumed_run_goes_on_where_its_checkpoint_ended(
    finished: Finished, tmp_path: Path
) -> None:
    run_dir = finished.copy(tmp_path)
    code, output = finish(
        start_run(finished.config, run_dir, "pipeline.num_steps=12", "checkpoint.resume=true")
    )
    assert code == 0, output
    assert kept_lines(run_dir) == (finished.output + output).splitlines()
    steps = records(run_dir)
    assert [record["step"] for record in steps] == list(range(12))
    ordinals = {rollout["ordinal"] for rollout in records(run_dir, "rollouts")}
    assert ordinals == set(range(12 * 4))  # no prompt twice, none left out
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 12  # of both attempts, as train_minutes
    assert summary["last_attempt_minutes"] > 0.0
    assert read_verdict(run_dir).state == "done"


def kept_lines(run_dir: Path) -> list[str]:
    """What the supervisor has on file, without the times."""
    text = (run_dir / "logs/supervisor.log").read_text()
    return re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", text, flags=re.MULTILINE).splitlines()


def num_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_not_resumed_with_another_task(finished: Finished, tmp_path: Path) -> None:
    run_dir = finished.copy(tmp_path)
    before = contents(run_dir)
    code, output = finish(
        start_run(
            finished.config, run_dir, "pipeline.num_steps=12", "checkpoint.resume=true",
            "task.num_letters=3",
        )
    )  # fmt: skip
    assert code == 2, output
    assert "another model, task, seed or adapter" in output
    assert re.search(r"\(task\.num_letters: \d+ there, 3 here\)", output), output
    assert contents(run_dir) == before
    assert json.loads(before[run_dir / "summary.json"])["outcome"] == "done"


def test_a_run_killed_between_checkpoints_resumes_with_one_history(
    model: Path, tmp_path: Path
) -> None:
    # F085.
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, model)
    overrides = ("pipeline.num_steps=100000", "checkpoint.every_steps=5")
    process = start_run(config, run_dir, *overrides)
    wait_for(lambda: num_steps(run_dir) >= 12, process)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    newest = max(int(p.name[-6:]) for p in (run_dir / "checkpoints").glob("version-*"))
    last = newest + 6
    code, output = finish(
        start_run(
            config, run_dir, f"pipeline.num_steps={last}", "checkpoint.every_steps=5",
            "checkpoint.resume=true",
        )
    )  # fmt: skip
    assert code == 0, output
    assert [record["step"] for record in records(run_dir)] == list(range(last))
    trained = [(r["step"], r["ordinal"]) for r in records(run_dir, "rollouts")]
    ordinals = [ordinal for _, ordinal in trained]
    assert set(ordinals) == set(range(last * 4))  # groups_per_step = 4: none lost
    assert all(ordinals.count(o) == 4 for o in set(ordinals))  # group_size = 4: none twice
    assert (run_dir / "checkpoints" / f"version-{last:06d}").is_dir()
