"""Adaptive staleness and alerts in whole runs that were made to diverge by their learning rate."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.models import make_tiny_model
from tests.process.runs import finish, records, start_run, write_config

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

DIVERGING = ("optimizer.learning_rate=0.1", "pipeline.max_staleness=3", "pipeline.depth=3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_the_bound_is_lowered_under_drift_and_the_sampled_groups_follow(
    model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start_run(
        write_config(tmp_path, model), run_dir, *DIVERGING, "pipeline.num_steps=20",
        "pipeline.adaptive_staleness=true",
    )  # fmt: skip
    code, output = finish(process)
    assert code == 0, output
    steps = records(run_dir)
    bounds = [record["staleness/bound"] for record in steps]
    assert bounds[0] == 3
    assert min(bounds) < 3
    assert all(abs(after - before) <= 1 for before, after in pairwise(bounds))
    assert "bound 2" in output
    # A group keeps the bound it was admitted under; three steps later all of those are trained.
    for index, record in enumerate(steps):
        assert record["staleness/max"] <= max(bounds[max(0, index - 4) : index + 1])


def test_an_alert_ends_the_run_with_its_reason_if_asked_to(model: Path, tmp_path: Path) -> None:
    # F012, F019: the alarm.
    run_dir = tmp_path / "run"
    process = start_run(
        write_config(tmp_path, model), run_dir, *DIVERGING, "pipeline.num_steps=60",
        "telemetry.alerts=stop",
    )  # fmt: skip
    code, output = finish(process)
    assert code == 1
    steps = records(run_dir)
    text = steps[-1]["new_alerts"][0]
    assert all("new_alerts" not in record for record in steps[:-1])
    assert steps[-1]["alerts"]
    assert "AlertError" in output
    assert text in output
