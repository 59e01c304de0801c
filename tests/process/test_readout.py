"""What a run of several processes and two attempts leaves to be read: one series, one W&B run."""

import json
from pathlib import Path

import pytest

from asyncrl.report.page import write_report
from asyncrl.report.rollouts import ROW
from tests.models import make_tiny_model
from tests.process.runs import finish, records, start_run, write_config

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_two_generators_and_a_resume_leave_one_series_and_one_wandb_run(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, model)
    shared = ("pipeline.num_generators=2", "telemetry.wandb=offline", "eval.every_steps=1")
    code, output = finish(start_run(config, run_dir, *shared, "pipeline.num_steps=3"))
    assert code == 0, output
    code, output = finish(
        start_run(config, run_dir, *shared, "pipeline.num_steps=6", "checkpoint.resume=true")
    )
    assert code == 0, output
    # F085: offline W&B begins a folder for each attempt; the run's own file is one series.
    assert [record["step"] for record in records(run_dir)] == list(range(6))
    # F086: of four processes only one writes, and the second attempt keeps the id of the first.
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    # F090: one version for each evaluation, on an axis that rises.
    versions = [record["version"] for record in records(run_dir, "evals")]
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-1]) == (0, 6)
    assert_the_report_shows_both_attempts_as_one_run(run_dir)


def assert_the_report_shows_both_attempts_as_one_run(run_dir: Path) -> None:
    data = write_report(run_dir, run_dir / "report.html")
    assert data["run"]["state"] == "done"
    assert data["steps"]["step"] == list(range(6))
    assert data["causes"]["exact"] == [True] * 6  # from the traces of both attempts
    windows = data["causes"]["strips"]["steps"]
    assert [step for step, _, _ in windows] == list(range(6))
    for (_, start, end), kinds in zip(windows, data["causes"]["by_step"], strict=True):
        # One learner all the time; two generators but for their start and end.
        assert sum(kinds["learner"].values()) == pytest.approx(end - start, abs=0.01, rel=0.01)
        assert sum(kinds["generator"].values()) <= 2 * (end - start) + 0.01
    rollouts = data["rollouts"]
    assert len(rollouts["rows"]) == rollouts["num_found"] == 6 * 4 * 4
    tokens = [row[-1] for row in rollouts["rows"] if row[-1]]
    assert len(tokens) == 6 * 2 * 4  # two groups of a step (telemetry.num_detailed_groups)
    for row in rollouts["rows"]:
        step = rollouts["groups"][row[0]][0]
        assert 0 <= step - row[ROW.index("spans")][0][0] <= 2  # k
    # At staleness 0 both sides compute the same: float32, equal weights, one host.
    for row in rollouts["rows"]:
        fresh = row[ROW.index("spans")][0][0] == rollouts["groups"][row[0]][0]
        if row[-1] and fresh:
            for mu, pi in zip(row[-1][1], row[-1][2], strict=True):
                assert pi is None or pi == pytest.approx(mu, abs=2e-3)
