"""The W&B client, in a process of its own: `python -m asyncrl.telemetry.wandb_process`.

Reads JSON lines: first the arguments of wandb.init, then one `sinks.WandbRow` each; the end of input
finishes the run. The client waits for its network in exit handlers, so it must not live in the learner:
this process can be killed without losing anything that metrics.jsonl does not have.

Two axes: steps over "step", evaluations over "eval/version". The client's own step only counts rows, so
that no row is refused for coming late. Online a resumed run goes on behind the rows that the server has;
offline nobody tells the client, so their number is kept beside the attempts' folders.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.telemetry.sinks import WandbRow


def main() -> None:
    """Forward rows until the input ends."""
    import wandb  # takes a second, and nobody else needs it

    settings = json.loads(sys.stdin.readline())
    run = wandb.init(**settings)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    run.define_metric("eval/*", step_metric="eval/version")
    numbers = _row_numbers(settings)
    for line in sys.stdin:
        row: WandbRow = json.loads(line)
        run.log(row["values"] | _objects(wandb, row), step=next(numbers))
        for title, text in row["alerts"]:
            run.alert(title=title, text=text, level="WARN")
    run.finish()


def _row_numbers(settings: dict[str, Any]) -> Iterator[int | None]:
    """The client's step for each row; None leaves it to the client."""
    if settings["mode"] != "offline":
        while True:
            yield None
    path = Path(settings["dir"], "wandb", f"rows-{settings['id']}")
    number = int(path.read_text() or 0) if path.exists() else 0
    while True:
        number += 1
        path.write_text(str(number))
        yield number - 1


def _objects(wandb: Any, row: WandbRow) -> dict[str, Any]:  # noqa: ANN401
    """Histograms and tables as the client's own types."""
    histograms = {
        name: wandb.Histogram(np_histogram=(counts, edges))
        for name, (counts, edges) in row["histograms"].items()
    }
    tables = {
        name: wandb.Table(columns=table[0], data=table[1:]) for name, table in row["tables"].items()
    }
    return histograms | tables


if __name__ == "__main__":
    main()
