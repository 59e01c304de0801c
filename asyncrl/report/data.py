"""Everything the page shows, as one JSON object, from a run folder in whatever state.

| key      | from                        | content                                                   |
|----------|-----------------------------|-----------------------------------------------------------|
| run      | run.json, config, verdict   | name, settings, provenance, how it ended; who was         |
|          | restarts.jsonl              | started again                                             |
| steps    | metrics.jsonl               | one list a metric, null where a step has none             |
| notes    | "                           | alerts that began, by step; why steps took their time     |
| evals    | evals.jsonl                 | held-out evaluations by version                           |
| drops    | drops.jsonl                 | groups that left untrained, with the reason               |
| causes   | trace/                      | seconds by step and cause; strips of every process        |
| rollouts | rollouts.jsonl, drops.jsonl | groups and rows of the browser                            |
| glossary | telemetry                   | what metrics, causes, alerts and drop reasons mean        |
"""

import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl.report.causes import causes_by_step, meanwhile_by_step, strips
from asyncrl.report.files import (
    read_by,
    read_config,
    read_object,
    read_restarts,
    read_split,
    setting,
)
from asyncrl.report.rollouts import browse
from asyncrl.report.shapes import DROP, EVAL, STEP, fit
from asyncrl.report.slow import explain
from asyncrl.report.verdict import read_verdict
from asyncrl.report.words import glossary
from asyncrl.telemetry.attribution import record_shares
from asyncrl.telemetry.jsonlines import Record, number, read_lines
from asyncrl.telemetry.lives import read_lives

BUDGET_BYTES = 40 * 2**20
"""Of rollouts in a page: browsers open pages of this size in a second or two."""

_SHORT = (
    ("model", "model.path"), ("task", "task.kind"), ("k", "pipeline.max_staleness"),
    ("depth", "pipeline.depth"), ("groups a step", "pipeline.groups_per_step"),
    ("group size", "pipeline.group_size"), ("steps", "pipeline.num_steps"),
    ("generators", "pipeline.num_generators"), ("engine", "engine.kind"),
    ("loss", "algorithm.loss.kind"), ("correction", "algorithm.correction.kind"),
    ("advantage", "algorithm.advantage"), ("learning rate", "optimizer.learning_rate"),
    ("seed", "seed"),
)  # fmt: skip


def collect(run_dir: Path, *, budget_bytes: int = BUDGET_BYTES) -> dict[str, Any]:
    """The page's data.

    Args:
        run_dir: a run folder, or what is left of one.
        budget_bytes: of rollouts, as they lie in the file.
    """
    config, text = read_config(run_dir)
    records = read_by(run_dir / "metrics.jsonl", "step", STEP)
    steps = [record["step"] for record in records]
    lives = read_lives(run_dir)
    by_step, meanwhile = causes_by_step(lives), meanwhile_by_step(lives)
    kinds = [by_step.get(record["step"]) or _from_record(record) for record in records]
    on = [record.get("alerts", []) for record in records]
    waited = [meanwhile.get(step, {}) for step in steps]
    times = explain(kinds, alerts=on, meanwhile=waited)
    drops = (fit(drop, DROP) for drop in read_lines(run_dir / "drops.jsonl"))
    return {
        "run": _run(run_dir, config, text),
        "steps": columns(records),
        "notes": {
            "alerts": [
                {"step": record["step"], "text": note}
                for record in records
                for note in record.get("new_alerts", ())
            ],
            "on": on,
            "skipped": [record.get("skipped", "") for record in records],
            "times": [[e.seconds, e.usual_s, e.slow, e.text] for e in times],
        },
        "evals": read_by(run_dir / "evals.jsonl", "version", EVAL),
        "drops": [{k: v for k, v in drop.items() if k != "payload"} for drop in drops],
        "causes": {
            "by_step": [_rounded(part) for part in kinds],
            "exact": [step in by_step for step in steps],
            "strips": strips(lives, read_split(run_dir), set(chain.from_iterable(on))),
        },
        "rollouts": browse(run_dir, budget_bytes=budget_bytes).as_json(),
        "glossary": glossary(),
    }


def columns(records: Sequence[Record]) -> dict[str, list[float | None]]:
    """One list for every number that any record has, as long as `records`."""
    names = dict.fromkeys(
        name for record in records for name, value in record.items() if number(value) is not None
    )
    return {name: [_short(number(record.get(name))) for record in records] for name in names}


def _short(value: float | None) -> float | int | None:
    """Six digits are more than a curve shows, and a third of the bytes."""
    if value is None or value == int(value):
        return None if value is None else int(value)
    return float(f"{value:.6g}")


def _run(run_dir: Path, config: Record, text: str) -> dict[str, Any]:
    verdict = read_verdict(run_dir)
    provenance = read_object(run_dir / "run.json")
    return {
        "name": str(setting(config, "name") or run_dir.resolve().name),
        "folder": str(run_dir.resolve()),
        "state": verdict.state,
        "verdict": verdict.text,
        "restarts": read_restarts(run_dir),
        "short": [
            [label, value] for label, path in _SHORT if (value := setting(config, path)) is not None
        ],
        "config": text,
        "max_staleness": setting(config, "pipeline.max_staleness"),
        "num_steps": setting(config, "pipeline.num_steps"),
        "groups_per_step": setting(config, "pipeline.groups_per_step"),
        "provenance": provenance,
        "summary": read_object(run_dir / "summary.json"),
        "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _from_record(record: Record) -> dict[str, dict[str, float]]:
    """A step's seconds by cause without a trace: its shares times its length.

    Shares are over at least a second, so short steps blur into their neighbours.
    """
    step_s = number(record.get("time/step_s")) or 0.0
    return {
        kind: {cause: share * step_s for cause, share in causes.items() if share > 0}
        for kind, causes in record_shares(record).items()
    }


def _rounded(kinds: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        kind: {cause: float(f"{s:.4g}") for cause, s in causes.items() if s > 0}
        for kind, causes in kinds.items()
    }
