"""Several sweep processes on one `out`: none repeats, deletes or waits for what another one does."""

import contextlib
import json
from pathlib import Path

import pytest

from asyncrl.config import to_toml
from asyncrl.errors import ConfigError
from asyncrl.sweep.locks import part_of, take_run
from asyncrl.sweep.plan import PlannedRun, plan_runs
from asyncrl.sweep.row import failed_row, read_row, write_row
from asyncrl.sweep.run import Runner
from asyncrl.sweep.settings import SweepSettings, read_sweep

BASE = """
[model]
path = "./absent"
[task]
kind = "repeat_letter"
[pipeline]
num_steps = 4
"""
"""Its runs fail within a second, for want of a model."""

CAUSE = "model.path='./absent' holds no model"


def plan(folder: Path) -> tuple[SweepSettings, list[PlannedRun]]:
    (folder / "base.toml").write_text(BASE)
    (folder / "sweep.toml").write_text(
        f'base = "base.toml"\nout = "{folder}/out"\n'
        "[grid]\nseed = [0, 1, 2]\npipeline.max_staleness = [0]\n"
    )
    settings = read_sweep(folder / "sweep.toml")
    return settings, plan_runs(settings)


def leave_row(run: PlannedRun) -> str:
    """What another process leaves of a finished run; the text of its row."""
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "run.json").write_text("{}")
    (run.run_dir / "config.toml").write_text(to_toml(run.config))
    curve = [{"version": 4, "score": 1.0, "num_samples": 8}]
    done = {"outcome": "done", "curve": curve, "final": 1.0, "area_samples": 1.0}
    write_row(run.run_dir, failed_row(run, "", seconds=1.0) | done)
    return (run.run_dir / "row.json").read_text()


def test_parts_of_one_count_work_side_by_side_and_others_are_refused(tmp_path: Path) -> None:
    with part_of(tmp_path, 0, 2), part_of(tmp_path, 1, 2):
        with pytest.raises(ConfigError, match=r"with --shard I/2, and this one has I/1"):
            part_of(tmp_path, 0, 1).__enter__()
        with pytest.raises(ConfigError, match="is in use"):
            part_of(tmp_path, 1, 2).__enter__()
    with (  # nobody else is there any more
        part_of(tmp_path, 0, 1),
        pytest.raises(ConfigError, match=r"with --shard I/1, and this one has I/2"),
    ):
        part_of(tmp_path, 0, 2).__enter__()


def test_a_count_stays_while_any_part_of_it_works(tmp_path: Path) -> None:
    with contextlib.ExitStack() as first:
        first.enter_context(part_of(tmp_path, 0, 12))
        with part_of(tmp_path, 1, 12):
            first.close()
            with pytest.raises(ConfigError, match=r"I/12, and this one has I/1,"):
                part_of(tmp_path, 0, 1).__enter__()


def test_a_run_that_another_process_finished_meanwhile_is_not_repeated(tmp_path: Path) -> None:
    settings, runs = plan(tmp_path)
    said: list[str] = []
    left = {}

    def say(line: str) -> None:
        said.append(line)
        if line == f"{runs[0].name}: started":
            left[runs[1].name] = leave_row(runs[1])

    assert Runner(settings, runs, say).run() == 1
    assert f"{runs[1].name}: finished by another process meanwhile" in said
    assert (runs[1].run_dir / "row.json").read_text() == left[runs[1].name]
    for run in (runs[0], runs[2]):
        assert CAUSE in (read_row(run.run_dir) or {})["cause"]
    assert said[-1].startswith(f"[3/3] {runs[2].name} FAILED")


def test_a_run_that_another_process_has_begun_is_left_to_it(tmp_path: Path) -> None:
    """From the moment of its start: the run's process takes the folder's own lock only later."""
    settings, runs = plan(tmp_path)
    said: list[str] = []
    codes = []

    def say(line: str) -> None:
        if line == f"{runs[0].name}: started":
            codes.append(Runner(settings, runs[:1], said.append).run())

    assert Runner(settings, runs[:1], say).run() == 1
    assert codes == [1]
    assert said == [f"{runs[0].name}: another process works in {runs[0].run_dir}; left to it"]
    assert CAUSE in (read_row(runs[0].run_dir) or {})["cause"]


def test_a_run_that_is_left_to_another_process_takes_no_slot(tmp_path: Path) -> None:
    settings, runs = plan(tmp_path)
    lock = take_run(settings.folder, runs[0].name)
    assert lock is not None
    with lock:
        said: list[str] = []
        assert Runner(settings, runs[:2], said.append).run() == 1
    assert read_row(runs[0].run_dir) is None
    assert CAUSE in (read_row(runs[1].run_dir) or {})["cause"]
    assert take_run(settings.folder, runs[1].name) is not None  # given back with its row


def test_a_folder_that_became_another_sweeps_stays_and_stops_nothing(tmp_path: Path) -> None:
    settings, runs = plan(tmp_path)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line == f"{runs[0].name}: started":
            row = json.loads(leave_row(runs[1]))
            write_row(runs[1].run_dir, row | {"digest": "another"})

    assert Runner(settings, runs, say).run() == 1
    assert any("holds a run with settings of digest another" in line for line in said)
    assert (read_row(runs[1].run_dir) or {})["digest"] == "another"
    assert CAUSE in (read_row(runs[2].run_dir) or {})["cause"]


def test_a_run_whose_row_was_never_written_gets_one_without_a_second_training(
    tmp_path: Path,
) -> None:
    settings, runs = plan(tmp_path)
    leave_row(runs[0])
    (runs[0].run_dir / "row.json").unlink()
    (runs[0].run_dir / "summary.json").write_text(
        json.dumps({"outcome": "done", "last_attempt_minutes": 1.5})
    )
    said: list[str] = []
    assert Runner(settings, runs[:1], said.append).run() == 1
    assert [line for line in said if "started" in line] == []
    row = read_row(runs[0].run_dir) or {}
    assert "is incomplete: 0 steps" in row["cause"]
    assert row["run_seconds"] == 90.0  # what the run itself took
