"""`asyncrl sweep`: plan, run what is missing, write the result.

Several hosts with one folder: each takes a part (`--shard 0/4`, `--shard 1/4`, ...); every one writes the
result of all rows that are there when it ends, so the last one's is whole. Without a common folder, run
the shards apart, copy their run folders into one `out`, and call `--report` there.
"""

from collections.abc import Sequence

from asyncrl.errors import ConfigError
from asyncrl.extras import check_matplotlib
from asyncrl.sweep.figure import draw_all
from asyncrl.sweep.host import row_of
from asyncrl.sweep.locks import part_of
from asyncrl.sweep.page import make_page
from asyncrl.sweep.plan import PlannedRun, plan_runs, shard
from asyncrl.sweep.result import Result, make_result, write_result
from asyncrl.sweep.row import write_whole
from asyncrl.sweep.run import Runner
from asyncrl.sweep.settings import SweepSettings
from asyncrl.telemetry.terminal import say


def sweep(settings: SweepSettings, *, part: tuple[int, int], report_only: bool) -> int:
    """Run part i of n of the sweep, unless only the report is wanted; returns the exit code.

    Raises:
        ConfigError: settings are wrong, `out` holds finished runs of another sweep, another process works
            on the same part or cuts the sweep into other parts, or `report_only` and there is nothing to
            report, or matplotlib is missing.
    """
    runs = plan_runs(settings)
    if report_only:
        check_matplotlib()
        _report(settings, runs)
        return 0
    mine = shard(runs, *part)
    with part_of(settings.folder, *part):
        of_all = f" (of {len(runs)})" if len(mine) < len(runs) else ""
        for run in runs:
            row_of(run)  # also those of other parts: the result takes in all of them
        say(f"sweep {settings.name}: {len(mine)} runs{of_all} in {settings.folder}")
        code = Runner(settings, mine, say).run()
        if code != 130:
            _report(settings, runs)
    return code


def _report(settings: SweepSettings, runs: Sequence[PlannedRun]) -> Result:
    """Write sweep.json, the figures and sweep.html; say the verdict."""
    result = make_result(settings, runs)
    if not result["rows"]:
        raise ConfigError(f"{settings.folder} holds no finished run of this sweep")
    say(f"result: {write_result(settings.folder, result)}")
    figures = {}
    try:
        figures = draw_all(result, settings.folder)
    except ConfigError as error:  # the runs are what took the time; tables need no matplotlib
        say(str(error))
    page = settings.folder / "sweep.html"
    write_whole(page, make_page(result, figures))
    say(f"page: {page}")
    for name, cause in result["failed"].items():
        say(f"FAILED {name}: {cause}")
    if result["missing"]:
        say(f"{len(result['missing'])} of {result['num_planned']} runs are missing")
    for entry in result["verdict"]:
        say(entry["sentence"])
    return result
