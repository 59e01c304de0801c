"""`asyncrl watch RUN`: the run in the terminal, redrawn every second until it ends.

Reads the run folder only, so any number of people may watch, from any host that sees it.
"""

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from asyncrl.errors import ConfigError
from asyncrl.report.frame import frame
from asyncrl.report.state import RunState

_EVERY_S = 1.0


def watch(run_dir: Path, *, once: bool, console: Console | None = None) -> int:
    """Show the run until it has ended, or one frame; returns 0.

    Raises:
        ConfigError: the folder holds no run.
    """
    console = console or Console(highlight=False)
    state = RunState(run_dir)
    if state.verdict.state == "empty":
        raise ConfigError(
            f"{run_dir} has neither run.json nor a record of a step (metrics.jsonl): it is not the "
            "folder of a run"
        )
    if once or state.verdict.state != "running":
        console.print(frame(state))
        return 0
    try:
        with Live(frame(state), console=console, auto_refresh=False) as live:
            while state.verdict.state == "running":
                time.sleep(_EVERY_S)
                state.read()
                live.update(frame(state), refresh=True)
    except KeyboardInterrupt:
        pass  # the viewer's end, not the run's
    return 0
