"""Scores that are none: not judged, not drawn, and named."""

import math
import re
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.sweep.host import state_of
from asyncrl.sweep.page import make_page
from asyncrl.sweep.result import make_result
from asyncrl.sweep.row import done_row, failed_row, read_row, write_row
from tests.unit.sweep_folders import plan, record, write_evals


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ((0.0, math.nan, 1.0), "score at version 2 is nan"),
        ((0.0, 0.5, math.inf), "score at version 4 is inf"),
    ],
)
def test_a_score_that_is_no_number_is_refused_by_name(
    tmp_path: Path, scores: tuple[float, ...], said: str
) -> None:
    settings, runs = plan(tmp_path)
    for run in runs:
        record(run, scores=scores if run is runs[1] else (0.0, 0.5, 1.0))
    name = re.escape(runs[1].name)
    at_version = said.rpartition(" ")[0]
    with pytest.raises(ValueError, match=f"{name}: its {at_version} None, expected a finite"):
        done_row(runs[1], seconds=1.0)

    row = done_row(runs[0], seconds=1.0)  # one that was written before, or by hand
    for point, score in zip(row["curve"], scores, strict=True):
        point["score"] = score
    write_row(runs[1].run_dir, row | {"name": runs[1].name, "final": scores[-1]})
    for call in (lambda: make_result(settings, runs), lambda: state_of(runs[1])):
        with pytest.raises(ConfigError, match=f"{name}/row.json: its {said}.*delete"):
            call()


@pytest.mark.parametrize("score", [0.0, None])
def test_a_run_whose_last_evaluation_has_no_score_is_not_judged(
    tmp_path: Path, score: float | None
) -> None:
    settings, runs = plan(tmp_path)
    for run in runs:
        record(run)
    write_evals(runs[1], (0, 0.0, 8, 0), (4, score, 0, 8))
    said = f"none of the 8 samples of the last evaluation was scored.*{re.escape(runs[1].name)}"
    with pytest.raises(ValueError, match=said) as caught:
        done_row(runs[1], seconds=1.0)
    for run in runs:
        row = done_row(run, seconds=1.0) if run is not runs[1] else None
        write_row(run.run_dir, row or failed_row(run, str(caught.value), seconds=1.0))
    verdict = make_result(settings, runs)["verdict"][0]
    assert "1 of 3 runs failed: none of the 8 samples of the last" in verdict["sentence"]


def test_a_row_whose_last_score_is_of_no_sample_is_refused(tmp_path: Path) -> None:
    _, (run, *_) = plan(tmp_path)
    record(run)
    row = done_row(run, seconds=1.0)
    row["curve"][-1] |= {"score": 0.0, "num_samples": 0}
    write_row(run.run_dir, row | {"final": 0.0})
    with pytest.raises(
        ConfigError, match=f"{re.escape(run.name)}/row.json: its last score is of no"
    ):
        read_row(run.run_dir)


@pytest.mark.parametrize("score", [0.0, None])
def test_an_evaluation_without_a_score_is_no_point_of_the_curve(
    tmp_path: Path, score: float | None
) -> None:
    _, (run, *_) = plan(tmp_path)
    record(run)
    write_evals(run, (0, 0.2, 8, 0), (2, score, 0, 8), (4, 0.8, 6, 2))
    row = done_row(run, seconds=1.0)
    assert [(p["version"], p["score"]) for p in row["curve"]] == [(0, 0.2), (4, 0.8)]
    assert row["area_samples"] == pytest.approx((0.2 + 0.8) / 2)  # straight over the gap


def test_the_page_names_unscored_samples_of_the_last_evaluation(tmp_path: Path) -> None:
    settings, runs = plan(tmp_path)
    for run in runs[:2]:
        record(run)
    write_evals(runs[0], (0, 0.2, 5, 3), (4, 0.8, 6, 2))
    for run in runs[:2]:
        write_row(run.run_dir, done_row(run, seconds=1.0))
    assert [(read_row(run.run_dir) or {})["num_unscored"] for run in runs[:2]] == [2, 0]
    page = make_page(make_result(settings, runs), {})
    assert "<td>0.800 (2 unscored)</td>" in page
    assert page.count("unscored") == 1
