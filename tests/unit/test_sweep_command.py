"""A call of the sweep on a folder in which there are runs of other settings."""

from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.sweep.command import sweep
from asyncrl.sweep.plan import PlannedRun
from asyncrl.sweep.result import make_result
from asyncrl.sweep.row import done_row, failed_row, write_row
from tests.unit.sweep_folders import plan, record

OTHER = "set.optimizer.learning_rate=0.5"
NO_MODEL = 'set.model.path="./absent"'
"""A run that is started after all fails at once."""


def finish(run: PlannedRun) -> None:
    record(run)
    write_row(run.run_dir, done_row(run, seconds=1.0))


def refusal(found: PlannedRun, wanted: PlannedRun) -> str:
    return (
        f"{wanted.run_dir} holds a run with settings of digest {found.config.digest}, "
        f"the sweep's file asks for {wanted.config.digest}"
    )


def test_a_result_takes_no_finished_run_of_another_sweep(tmp_path: Path) -> None:
    _, others = plan(tmp_path, OTHER)
    settings, runs = plan(tmp_path)
    finish(runs[0])
    finish(others[3])
    with pytest.raises(ConfigError) as caught:
        make_result(settings, runs)
    assert refusal(others[3], runs[3]) in str(caught.value)


def test_a_report_of_another_sweeps_folder_is_refused_by_the_name_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, others = plan(tmp_path, OTHER)
    settings, runs = plan(tmp_path)
    finish(others[0])
    with pytest.raises(ConfigError) as caught:
        sweep(settings, part=(0, 1), report_only=True)
    assert refusal(others[0], runs[0]) in str(caught.value)
    assert not (settings.folder / "sweep.json").exists()


def test_a_part_starts_nothing_beside_another_sweeps_runs_of_other_parts(tmp_path: Path) -> None:
    _, others = plan(tmp_path, NO_MODEL, OTHER)
    settings, runs = plan(tmp_path, NO_MODEL)
    finish(others[1])  # of part 1 of 2
    with pytest.raises(ConfigError) as caught:
        sweep(settings, part=(0, 2), report_only=False)
    assert refusal(others[1], runs[1]) in str(caught.value)
    assert [path.name for path in (settings.folder / "runs").iterdir()] == [runs[1].name]


def test_a_failed_run_of_other_settings_is_missing_as_it_is_made_again(tmp_path: Path) -> None:
    """One changes the settings because of it, and then the sweep goes on."""
    _, others = plan(tmp_path, OTHER)
    settings, runs = plan(tmp_path)
    finish(runs[0])
    others[1].run_dir.mkdir()
    write_row(others[1].run_dir, failed_row(others[1], "diverged", seconds=1.0))
    result = make_result(settings, runs)
    assert result["missing"] == [run.name for run in runs[1:]]
    assert result["failed"] == {}
