"""The result of a sweep: sweep.json, from the rows of its runs.

| key       | content                                                                             |
|-----------|-------------------------------------------------------------------------------------|
| verdict   | one entry a variant and endpoint (verdict.py)                                       |
| cells     | one entry a variant and k: means over seeds with percentile intervals, see `cell`   |
| rows      | one entry a run (row.py), failed ones with their cause; `missing` names the others  |
| configs   | the resolved config of each variant at its smallest k and first seed                |
| run_hosts | the distinct commits, hardware and library versions that runs were made with        |
| and       | commit, dirty flag, command, hardware, versions, start of the process that wrote it |

area_seconds, a cell's score against wall clock, is the mean score over the first T seconds of a run, T
the end of the variant's fastest run (row.py says what counts). It has no verdict: it depends on the host.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.sweep.host import row_of
from asyncrl.sweep.intervals import percentile_interval
from asyncrl.sweep.plan import PlannedRun
from asyncrl.sweep.row import Row, area, write_whole
from asyncrl.sweep.settings import SweepSettings
from asyncrl.sweep.verdict import judge
from asyncrl.telemetry.provenance import provenance

RESULT = "sweep.json"
_MEANS = ("final", "area_samples", "area_seconds", "staleness_mean", "ess", "ratio_ess", "k3")
_OF_A_HOST = ("commit", "dirty", "hardware", "versions")
_SEED = 0
"""Of the bootstrap: the same rows give the same intervals."""

Result = dict[str, Any]


def make_result(settings: SweepSettings, runs: Sequence[PlannedRun]) -> Result:
    """What is known by now of all planned runs.

    Raises:
        ConfigError: a run's folder holds a finished run of another sweep, or a score that is none.
    """
    found = {run.name: row_of(run) for run in runs}
    rows = [row for row in found.values() if row is not None]
    cells = make_cells(rows)
    planned = [(run.variant, run.k, run.seed) for run in runs]
    return provenance() | {
        "name": settings.name,
        "settings": settings.model_dump(mode="json"),
        "num_planned": len(runs),
        "missing": [name for name, row in found.items() if row is None],
        "failed": {row["name"]: row["cause"] for row in rows if row["outcome"] == "failed"},
        "verdict": [verdict.as_json() for verdict in judge(rows, planned)],
        "cells": cells,
        "configs": _configs(runs),
        "run_hosts": _run_hosts(rows),
        "rows": [{key: row[key] for key in row if key != "provenance"} for row in rows],
    }


def write_result(folder: Path, result: Result) -> Path:
    """sweep.json in the sweep's folder, replaced as a whole."""
    path = folder / RESULT
    write_whole(path, json.dumps(result, indent=1) + "\n")
    return path


def make_cells(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every variant and k that has a row, in the order of the plan's variants and ascending k."""
    horizons = _horizons(rows)
    groups: dict[tuple[str, int], list[Row]] = {}
    for variant in dict.fromkeys(row["variant"] for row in rows):
        for row in sorted(rows, key=lambda row: row["k"]):
            if row["variant"] == variant:
                groups.setdefault((variant, row["k"]), []).append(row)
    return [cell(*key, members, horizons.get(key[0])) for key, members in groups.items()]


def cell(variant: str, k: int, rows: Sequence[Row], horizon_s: float | None) -> dict[str, Any]:
    """Means over the finished runs of one variant and k: each {mean, low, high, num}, or None.

    Also the tokens of all runs by staleness, the curve of mean scores at equal samples, and `num_timed`,
    how many runs were not resumed: the curve's seconds are theirs, or of all runs if there is none.
    """
    done = [row for row in rows if row["outcome"] == "done"]
    rng = np.random.default_rng(_SEED)
    values = {
        name: [v for row in done if (v := value_of(row, name, horizon_s)) is not None]
        for name in _MEANS
    }
    tokens: dict[str, int] = {}
    for row in done:
        for age, count in row["staleness"]["tokens"].items():
            tokens[age] = tokens.get(age, 0) + count
    return {
        "variant": variant,
        "k": k,
        "num_done": len(done),
        "num_failed": len(rows) - len(done),
        "num_timed": len(_timed(done)),
        "horizon_s": horizon_s,
        "staleness_tokens": dict(sorted(tokens.items(), key=lambda item: int(item[0]))),
        "curve": _mean_curve(done, rng),
        **{name: _mean(found, rng) for name, found in values.items()},
    }


def value_of(row: Row, name: str, horizon_s: float | None) -> float | None:
    """A number of a finished run by its name in a cell; None where it has none."""
    if name == "staleness_mean":
        return row["staleness"]["mean"]
    if name == "area_seconds":
        if horizon_s is None or not _timed([row]):
            return None
        curve = row["curve"]
        return area([p["seconds"] for p in curve], [p["score"] for p in curve], until=horizon_s)
    return row[name]


def _horizons(rows: Sequence[Row]) -> dict[str, float]:
    """By variant: the time at which its fastest run ended."""
    ends: dict[str, float] = {}
    for row in _timed([row for row in rows if row["outcome"] == "done"]):
        end_s = row["curve"][-1]["seconds"]
        ends[row["variant"]] = min(end_s, ends.get(row["variant"], end_s))
    return ends


def _timed(done: Sequence[Row]) -> list[Row]:
    """The finished runs that can be compared by wall clock (row.py)."""
    return [row for row in done if row["attempts"] == 1]


def _mean(values: Sequence[float], rng: np.random.Generator) -> dict[str, float] | None:
    if not values:
        return None
    low, high = percentile_interval(values, rng)
    return {"mean": statistics.fmean(values), "low": low, "high": high, "num": len(values)}


def _mean_curve(done: Sequence[Row], rng: np.random.Generator) -> list[dict[str, float]]:
    """Mean score at equal samples, at as many places as the best evaluated run has.

    Runs were not evaluated at the same versions; between its evaluations a run's curve is straight.
    """
    if not done:
        return []
    num = max(len(row["curve"]) for row in done)
    grid = np.linspace(0.0, done[0]["trained_samples"], num)
    scores = np.array([_at(row, "score", grid) for row in done])
    seconds = np.array([_at(row, "seconds", grid) for row in _timed(done) or done])
    points = []
    for index, samples in enumerate(grid):
        low, high = percentile_interval(scores[:, index].tolist(), rng)
        points.append(
            {
                "samples": float(samples),
                "seconds": float(np.median(seconds[:, index])),
                "mean": float(scores[:, index].mean()),
                "low": low,
                "high": high,
            }
        )
    return points


def _at(row: Row, name: str, samples: NDArray[np.float64]) -> NDArray[np.float64]:
    places = [point["samples"] for point in row["curve"]]
    return np.interp(samples, places, [point[name] for point in row["curve"]])


def _configs(runs: Sequence[PlannedRun]) -> dict[str, Any]:
    firsts: dict[str, PlannedRun] = {}
    for run in sorted(runs, key=lambda run: run.k):
        firsts.setdefault(run.variant, run)
    return {name: run.config.model_dump(mode="json") for name, run in firsts.items()}


def _run_hosts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    hosts: list[dict[str, Any]] = []
    for row in rows:
        host = {key: row["provenance"].get(key) for key in _OF_A_HOST}
        if host not in hosts:
            hosts.append(host)
    return hosts
