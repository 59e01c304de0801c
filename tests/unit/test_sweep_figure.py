"""The figures of a sweep, and its page with and without them."""

import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.sweep.figure import draw_all, staleness
from asyncrl.sweep.page import make_page
from asyncrl.sweep.result import make_cells, make_result
from asyncrl.sweep.row import done_row, write_row
from tests.unit.sweep_folders import cell_row, plan, record


def test_the_page_holds_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    settings, runs = plan(tmp_path)
    for run in runs:
        record(run)
        write_row(run.run_dir, done_row(run, seconds=1.0))
    result = make_result(settings, runs)
    figures = draw_all(result, tmp_path)
    assert list(figures) == ["endpoints", "samples", "seconds", "staleness", "mismatch"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures.values())
    assert make_page(result, figures).count('src="data:image/png;base64,') == 5


def test_a_mean_staleness_is_read_off_a_linear_axis_with_ticks_around_it() -> None:
    pytest.importorskip("matplotlib")
    curve = [{"samples": 0, "seconds": 0.0, "score": 0.0}]
    rows = [cell_row(k, curve) for k in (0, 4)]
    rows[1]["staleness"]["mean"] = 1.89
    axis = staleness({"v": make_cells(rows)}).axes[0]
    assert axis.get_yscale() == "linear"
    low, high = axis.get_ylim()
    assert low == 0.0
    # The bound's line ends at 4; as many marks as whole versions, at least, are in sight below it.
    assert len([tick for tick in axis.get_yticks() if low <= tick <= min(high, 4.0)]) >= 5


def test_without_matplotlib_the_figures_say_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, runs = plan(tmp_path)
    record(runs[0])
    write_row(runs[0].run_dir, done_row(runs[0], seconds=1.0))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    result = make_result(settings, runs)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[analysis\]'"):
        draw_all(result, tmp_path)
    assert "they need matplotlib" in make_page(result, {})
