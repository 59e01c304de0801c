"""Overrides and options of a command line, in whatever order one types them."""

import itertools
from pathlib import Path

import pytest

from asyncrl.cli import main
from tests.unit.sweep_folders import plan

WORDS = ["set.seed=1", "--report", "grid.seed=[2]", "--shard=0/2"]


def call(*arguments: str) -> object:
    """The exit code."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


@pytest.mark.parametrize("order", list(itertools.permutations(WORDS)), ids=" ".join)
def test_overrides_of_a_sweep_stand_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: tuple[str, ...]
) -> None:
    pytest.importorskip("matplotlib")
    plan(tmp_path)
    code = call("sweep", str(tmp_path / "sweep.toml"), *order, "num_parallel=0")
    assert code == 2
    said = capsys.readouterr().err
    assert "unrecognized" not in said
    assert "num_parallel: " in said  # the last one has arrived, too
    code = call("sweep", str(tmp_path / "sweep.toml"), *order, f'out="{tmp_path}/none"')
    assert code == 2
    assert f"{tmp_path}/none holds no finished run of this sweep" in capsys.readouterr().err


def test_overrides_are_applied_from_left_to_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plan(tmp_path)
    file = str(tmp_path / "sweep.toml")
    assert call("sweep", file, "num_parallel=0", "--report", "num_parallel=1") == 2
    assert "holds no finished run" in capsys.readouterr().err
    assert call("sweep", file, "num_parallel=1", "--report", "num_parallel=0") == 2
    assert "num_parallel: " in capsys.readouterr().err


def test_overrides_of_a_run_stand_behind_the_options_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(tmp_path)
    arguments = ["seed=1", "--run-dir", str(tmp_path), "--supervised", "nonsense=3"]
    assert call("probe", str(tmp_path / "base.toml"), *arguments) == 2
    assert "nonsense: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "x.toml", "--reprot", "a=1"], "unrecognized arguments: --reprot a=1"),
        (["sweep", "x.toml", "--report", "a=1", "--b=2"], "unrecognized arguments: a=1 --b=2"),
        (["watch", "folder", "--once", "a=1"], "unrecognized arguments: a=1"),
    ],
)
def test_what_is_no_override_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert call(*arguments) == 2
    assert said in capsys.readouterr().err


def test_an_argument_behind_an_option_that_is_no_override_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(tmp_path)
    assert call("sweep", str(tmp_path / "sweep.toml"), "--report", "again") == 2
    assert "override 'again' is not of the form section.key=value" in capsys.readouterr().err
