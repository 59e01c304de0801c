"""What a run of several processes and two attempts leaves to be read: one series, one W&B run."""

import json
from pathlib import Path

import pytest

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
