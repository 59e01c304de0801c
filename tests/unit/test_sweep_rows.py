"""A run condensed to a row, what is left of its folder, and the result of many."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import to_toml
from asyncrl.errors import ConfigError
from asyncrl.generator.choice import settled
from asyncrl.sweep.figure import curve_label
from asyncrl.sweep.host import CONSOLE, cause_of, prune, state_of
from asyncrl.sweep.page import make_page
from asyncrl.sweep.result import make_cells, make_result
from asyncrl.sweep.row import area, done_row, failed_row, read_row, write_row, write_whole
from tests.unit.sweep_folders import cell_row, plan, record


def test_a_row_holds_the_curve_and_the_realized_staleness(tmp_path: Path) -> None:
    _, (run, *_) = plan(tmp_path)
    record(run)
    row = done_row(run, seconds=50.0)
    # 6 samples a step; the first step's 10 s are the engines' start, steps 1..3 take 11, 12, 13 s.
    assert [(p["samples"], p["seconds"]) for p in row["curve"]] == [
        (0, 0.0),
        (12, 11.0),
        (24, 36.0),
    ]
    assert row["final"] == 1.0
    assert row["area_samples"] == 0.5
    # Tokens: 4 * 6 of staleness 0, 2 * (0 + 1 + 2 + 3) of staleness 2; 24 / 36 of them, so 2/3.
    assert row["staleness"] == {"mean": 0.6667, "max": 2, "tokens": {0: 24, 2: 12}}
    assert row["k3"] == pytest.approx(0.15)
    assert row["ess"] == 1.0
    assert row["ratio_ess"] is None  # never measured
    assert row["attempts"] == 1


@pytest.mark.parametrize(("scores", "num"), [((0.0, 0.5), 4), ((0.0, 0.5, 1.0), 3), ((), 4)])
def test_a_run_without_its_last_step_or_evaluation_is_not_done(
    tmp_path: Path, scores: tuple[float, ...], num: int
) -> None:
    _, (run, *_) = plan(tmp_path)
    record(run, scores=scores, num=num)
    with pytest.raises(ValueError, match="is incomplete"):
        done_row(run, seconds=1.0)


def test_curves_of_runs_evaluated_at_other_versions_are_averaged_at_equal_samples() -> None:
    """At 10 of 20 samples the second run is half way between its evaluations at 5 and 15."""

    def row(points: list[tuple[int, float]]) -> dict[str, Any]:
        curve = [{"samples": s, "seconds": 2.0 * s, "score": y} for s, y in points]
        return cell_row(0, curve) | {"trained_samples": 20}

    (cell,) = make_cells(
        [row([(0, 0.0), (10, 0.5), (20, 1.0)]), row([(0, 0.0), (5, 0.2), (15, 0.4), (20, 0.6)])]
    )
    curve = cell["curve"]
    assert [point["samples"] for point in curve] == pytest.approx([0, 20 / 3, 40 / 3, 20])
    # First run: y = samples / 20. Second: 0.2 + (20/3 - 5) * 0.02 = 0.2333, 0.2 + (40/3 - 5) * 0.02.
    assert [point["mean"] for point in curve] == pytest.approx(
        [0, (1 / 3 + 0.7 / 3) / 2, (2 / 3 + 1.1 / 3) / 2, 0.8]
    )
    assert [point["seconds"] for point in curve] == pytest.approx([0, 40 / 3, 80 / 3, 40])


def test_writers_of_one_file_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    class Met(type(tmp_path)):  # type: ignore[misc]
        """A path that another writer replaces just before it is replaced itself."""

        def replace(self, target: Path) -> Path:
            write_whole(tmp_path / target.name, "of the other")
            assert (tmp_path / target.name).read_text() == "of the other"
            return super().replace(target)

    write_whole(Met(tmp_path / "sweep.json"), "own")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]
    assert (tmp_path / "sweep.json").read_text() == "own"


def test_attempts_are_counted_through_resumes(tmp_path: Path) -> None:
    _, (run, *_) = plan(tmp_path)
    record(run)
    earlier = {"commit": "a", "earlier": {"commit": "b"}}
    (run.run_dir / "run.json").write_text(json.dumps({"commit": "c", "earlier": earlier}))
    row = done_row(run, seconds=1.0)
    assert row["attempts"] == 3
    assert row["provenance"] == {"commit": "c"}


def test_the_state_of_a_folder_decides_what_is_repeated(tmp_path: Path) -> None:
    _, (run, *_) = plan(tmp_path)
    assert state_of(run) == "new"
    record(run)
    assert state_of(run) == "new"  # began, and nothing was saved
    (run.run_dir / "checkpoints/version-000002").mkdir(parents=True)
    assert state_of(run) == "resume"
    (run.run_dir / "summary.json").write_text(json.dumps({"outcome": "done"}))
    assert state_of(run) == "ended"  # killed before its row was written
    write_row(run.run_dir, done_row(run, seconds=1.0))
    assert state_of(run) == "done"
    write_row(run.run_dir, failed_row(run, "why", seconds=1.0))
    assert state_of(run) == "new"  # a failed run is made again
    with (run.run_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state_of(run) == "busy"


def test_a_half_run_that_measured_its_engines_is_the_one_that_asked_to_measure(
    tmp_path: Path,
) -> None:
    auto = ('set.engine.kind="vllm"', 'set.engine.engines_per_gpu="auto"')
    _, (run, *_) = plan(tmp_path, *auto)
    _, (other, *_) = plan(tmp_path, *auto, "set.optimizer.learning_rate=0.5")
    record(run)
    (run.run_dir / "checkpoints/version-000002").mkdir(parents=True)
    (run.run_dir / "probe.json").write_text(json.dumps({"engines": 4}))
    (run.run_dir / "config.toml").write_text(to_toml(settled(run.config, {"engines": 4})))
    assert state_of(run) == "resume"
    with pytest.raises(ConfigError, match="holds a run with settings of digest"):
        state_of(other)


def test_a_finished_or_half_run_of_other_settings_is_never_taken_nor_deleted(
    tmp_path: Path,
) -> None:
    _, (run, *_) = plan(tmp_path)
    _, (other, *_) = plan(tmp_path, "set.optimizer.learning_rate=0.5")
    record(run)
    (run.run_dir / "checkpoints/version-000002").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a run with settings of digest"):
        state_of(other)
    write_row(run.run_dir, done_row(run, seconds=1.0))
    with pytest.raises(ConfigError, match="give another `out`"):
        state_of(other)


def test_only_what_is_kept_stays_and_a_pruned_run_is_still_done(tmp_path: Path) -> None:
    settings, (run, *_) = plan(tmp_path, 'keep=["logs"]')
    record(run)
    for name in ("checkpoints/version-000004", "logs", "trace"):
        (run.run_dir / name).mkdir(parents=True)
    texts = ("rollouts.jsonl", "drops.jsonl", "drops.jsonl.set-aside")
    for name in (*texts, "summary.json", CONSOLE, "token"):
        (run.run_dir / name).write_text("{}")
    write_row(run.run_dir, done_row(run, seconds=1.0))
    prune(run.run_dir, settings)
    assert {path.name for path in run.run_dir.iterdir()} == {
        "config.toml", "evals.jsonl", "run.json", "summary.json", "row.json", "logs", CONSOLE,
    }  # fmt: skip
    assert state_of(run) == "done"


def test_the_cause_of_a_failure_is_what_the_run_said(tmp_path: Path) -> None:
    _, (run, *_) = plan(tmp_path)
    assert cause_of(run, -9) == "exit code -9"
    run.run_dir.mkdir(parents=True)
    console = run.run_dir / CONSOLE
    console.write_text("a\nlast words\n")
    assert cause_of(run, 3) == "exit code 3: last words"
    console.write_text("FAILED: old\nFAILED: learner: X\nrun x failed\n")
    assert cause_of(run, 1) == "learner: X"
    console.write_text("asyncrl: no such model\n")
    assert cause_of(run, 2) == "no such model"


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1)), min_size=1, max_size=8),
    st.integers(1, 120),
)
def test_an_area_is_the_mean_of_the_curve_sampled_finely(
    points: list[tuple[int, float]], until: int
) -> None:
    points.sort(key=lambda point: point[0])
    places = [float(place) for place, _ in points]
    scores = [score for _, score in points]
    if until <= places[0]:
        assert area(places, scores, until=until) == scores[-1]
        return

    def height(x: float) -> float:
        """The last segment of some width that holds x, or the last score."""
        for i in range(len(places) - 1):
            if places[i] <= x < places[i + 1]:
                share = (x - places[i]) / (places[i + 1] - places[i])
                return scores[i] + share * (scores[i + 1] - scores[i])
        return scores[-1]

    # The middles of unit-length pieces are exact: every break of the curve is an integer.
    pieces = range(int(places[0]), until)
    expected = sum(height(x + 0.5) for x in pieces) / len(pieces)
    assert area(places, scores, until=until) == pytest.approx(expected, abs=1e-9)


def test_an_area_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 0 and 0"):
        area([], [])


def test_wall_clock_is_compared_up_to_the_end_of_the_fastest_run(tmp_path: Path) -> None:
    def row(k: int, end_s: float, attempts: int = 1) -> dict[str, Any]:
        curve = [{"samples": v, "seconds": s, "score": v / 4} for v, s in ((0, 0.0), (4, end_s))]
        return cell_row(k, curve) | {"attempts": attempts}

    # The resumed run is the fastest, and does not count: 20 s is the horizon.
    slow, fast = make_cells([row(0, 40.0), row(4, 20.0), row(4, 1.0, attempts=2)])
    assert slow["horizon_s"] == fast["horizon_s"] == 20.0
    assert slow["area_seconds"]["mean"] == 0.25  # half way up: from 0 to 0.5
    assert fast["area_seconds"] == {"mean": 0.5, "low": 0.5, "high": 0.5, "num": 1}
    assert fast["num_done"] == 2


def test_resumed_runs_have_no_part_in_the_seconds_of_a_curve(tmp_path: Path) -> None:
    def row(end_s: float, score: float, attempts: int = 1) -> dict[str, Any]:
        curve = [{"samples": v, "seconds": s, "score": score} for v, s in ((0, 0.0), (4, end_s))]
        return cell_row(4, curve) | {"attempts": attempts}

    (mixed,) = make_cells([row(40.0, 0.5), row(20.0, 0.5), row(1000.0, 0.8, attempts=2)])
    assert mixed["num_timed"] == 2
    # Seconds: the median of 40 and 20; the score is over all three: 1.8 / 3.
    assert (mixed["curve"][-1]["seconds"], mixed["curve"][-1]["mean"]) == (30.0, pytest.approx(0.6))
    assert curve_label(mixed, "seconds") == "k = 4"

    (resumed,) = make_cells([row(40.0, 0.5, attempts=2), row(60.0, 0.5, attempts=3)])
    assert (resumed["num_timed"], resumed["curve"][-1]["seconds"]) == (0, 50.0)
    assert curve_label(resumed, "seconds") == "k = 4, resumed"
    assert curve_label(resumed, "samples") == "k = 4"  # samples are what they are


def test_the_page_says_where_all_seconds_are_of_resumed_runs(tmp_path: Path) -> None:
    settings, runs = plan(tmp_path)
    for run in runs:
        record(run)
        if run.k == 4:
            earlier = {"commit": "a"}
            (run.run_dir / "run.json").write_text(json.dumps({"commit": "c", "earlier": earlier}))
        write_row(run.run_dir, done_row(run, seconds=7.0))
    page = make_page(make_result(settings, runs), {})
    assert page.count("every run was resumed") == 1
    assert "base, k = 4: every run was resumed" in page
    assert "<th>seconds of last attempt</th>" in page
    assert "<td>7.0</td><td>2</td>" in page


def test_a_result_names_failed_and_missing_runs(tmp_path: Path) -> None:
    settings, runs = plan(tmp_path)
    for run in runs[:3]:
        record(run)
        write_row(run.run_dir, done_row(run, seconds=1.0))
    runs[3].run_dir.mkdir(parents=True)
    write_row(runs[3].run_dir, failed_row(runs[3], "learner: <NaN>", seconds=1.0))
    result = make_result(settings, runs)
    assert result["failed"] == {runs[3].name: "learner: <NaN>"}
    assert result["missing"] == [runs[4].name, runs[5].name]
    assert len(result["rows"]) == 4
    assert result["run_hosts"][0]["commit"] == "c"
    assert json.loads(json.dumps(result))["num_planned"] == 6
    page = make_page(result, {})
    assert "learner: &lt;NaN&gt;" in page
    assert "<NaN>" not in page
    assert "2 of 6 runs are missing" in page
    assert page.count("<table>") == page.count("<div class=scroll><table>") == 4
    assert ".scroll { overflow-x: auto }" in page
    assert "<script" not in page
    assert "http" not in page  # nothing is fetched
    assert read_row(runs[4].run_dir) is None
