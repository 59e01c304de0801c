"""Another algorithm through the same real processes."""

from pathlib import Path

import pytest

from tests.models import make_tiny_model
from tests.process.runs import finish, records, start_run, write_config

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def test_a_loss_of_completions_with_two_updates_a_step_trains_and_counts_versions_by_step(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, make_tiny_model(tmp_path / "tiny"))
    process = start_run(
        config, run_dir,
        "algorithm.loss.kind=gspo", "algorithm.loss.clip_low=0.01", "algorithm.loss.clip_high=0.01",
        "algorithm.aggregation=sequence_mean", "algorithm.num_minibatches=2",
        "algorithm.entropy_bonus=0.01", "pipeline.num_steps=6",
    )  # fmt: skip
    code, output = finish(process)
    assert code == 0, output
    steps = records(run_dir)
    assert [record["version"] for record in steps] == list(range(1, 7))
    assert all(record["optimizer/updates"] == 2 for record in steps)
    # The second update is clipped around the weights before the first; a single one never is.
    clipped = [record["ratio/clipped_high"] + record["ratio/clipped_low"] for record in steps]
    assert max(clipped) > 0
    # Groups without signal are computed as well: their entropy is raised.
    assert all(record["tokens/forward"] > 0 for record in steps)
