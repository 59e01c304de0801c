"""One run condensed to what a sweep compares; row.json in its folder says that it needs no other run.

| key             | meaning                                                                      |
|-----------------|------------------------------------------------------------------------------|
| curve           | evaluations: version, trained samples, seconds, mean held-out score, samples |
| final           | score of the last evaluation: the policy after the last step                 |
| num_unscored    | samples of the last evaluation that got no score                             |
| area_samples    | mean score over training: area under the curve / its width, trapezoid rule   |
| staleness       | of all trained tokens: mean, max, and tokens by staleness                    |
| run_seconds     | wall clock of the run's last attempt, its start and end included             |
| ess             | correction/ess, mean over steps: effective share under the loss's weights    |
| ratio_ess, k3   | mismatch/ess and mismatch/k3, mean over steps: how far pi_prox is from mu    |

An evaluation none of whose samples was scored says nothing: it is no point of the curve, and a run whose
last one is such has no row that could be judged.

Seconds count from the end of the first step, which waits for engines to start; a step's own time is
summed, so that a pause between two attempts does not count. A resumed run has waited for engines twice:
its `attempts` is above 1, and comparisons by wall clock leave it out.
"""

import json
import math
import os
import secrets
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.sweep.plan import PlannedRun, samples_per_step
from asyncrl.telemetry.console import read_records

ROW = "row.json"
_MEANS = {"ess": "correction/ess", "ratio_ess": "mismatch/ess", "k3": "mismatch/k3"}

Row = dict[str, Any]


def read_row(run_dir: Path) -> Row | None:
    """The row of a run that has ended, None if it has none.

    Raises:
        ConfigError: a score in it is no finite number, or the last one is of no sample.
    """
    path = run_dir / ROW
    if not path.exists():
        return None
    row: Row = json.loads(path.read_text())
    try:
        _check_scores(path, row)
    except ValueError as error:
        raise ConfigError(f"{error}; delete {run_dir} to have the run made again") from error
    return row


def write_row(run_dir: Path, row: Row) -> None:
    """Complete or absent."""
    write_whole(run_dir / ROW, json.dumps(row) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: a reader, or a kill, finds the old or the new one.

    Of several writers, on one host or many, the last one's stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    draft.write_text(text)
    draft.replace(path)


def failed_row(run: PlannedRun, cause: str, *, seconds: float) -> Row:
    """The row of a run that ended by `cause`."""
    return _head(run, seconds) | {"outcome": "failed", "cause": cause}


def done_row(run: PlannedRun, *, seconds: float) -> Row:
    """The row of a run that ended well, from the records in its folder.

    Raises:
        ValueError: a record that every finished run has is missing, no sample of the last evaluation
            was scored, or a score is no finite number.
    """
    steps = read_records(run.run_dir / "metrics.jsonl")
    evals = sorted(read_records(run.run_dir / "evals.jsonl"), key=lambda e: int(e["version"]))
    num_steps = run.config.pipeline.num_steps
    if len(steps) != num_steps or not evals or evals[-1]["version"] != num_steps:
        last = evals[-1]["version"] if evals else None
        raise ValueError(
            f"{run.run_dir} is incomplete: {len(steps)} steps and the last evaluation of version "
            f"{last}, expected {num_steps} and {num_steps}"
        )
    if not evals[-1]["num_samples"]:
        raise ValueError(
            f"none of the {evals[-1]['num_unscored']} samples of the last evaluation was scored, see "
            f"{run.run_dir}/evals.jsonl"
        )
    scored = [e for e in evals if e["num_samples"]]
    for e in scored:
        _check_score(run.run_dir, f"score at version {e['version']}", e["mean_score"])
    curve = _curve(run, steps, scored)
    row = _head(run, seconds) | {
        "outcome": "done",
        "curve": curve,
        "final": curve[-1]["score"],
        "num_unscored": evals[-1]["num_unscored"],
        "area_samples": area([p["samples"] for p in curve], [p["score"] for p in curve]),
        "staleness": _staleness(steps),
    }
    for name, metric in _MEANS.items():
        values = [record[metric] for record in steps if metric in record]
        row[name] = statistics.fmean(values) if values else None
    _check_scores(run.run_dir, row)
    return row


def _check_scores(place: Path, row: Row) -> None:
    """What intervals are made of; NaN would pass through every mean.

    Raises:
        ValueError: a score of a finished run is not finite, or the last one is of no sample.
    """
    if row["outcome"] != "done":
        return
    if not row["curve"][-1]["num_samples"]:  # a row made before such runs were refused
        raise ValueError(f"{place}: its last score is of no sample")
    scores = {f"score at version {point['version']}": point["score"] for point in row["curve"]}
    for name, score in (scores | {key: row[key] for key in ("final", "area_samples")}).items():
        _check_score(place, name, score)


def _check_score(place: Path, name: str, score: float | None) -> None:
    """Raises ValueError; None is what a NaN of a JSON-lines file is read as."""
    if score is None or not math.isfinite(score):
        raise ValueError(f"{place}: its {name} is {score}, expected a finite number")


def _head(run: PlannedRun, seconds: float) -> Row:
    path = run.run_dir / "run.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    attempts, earlier = 1, record.pop("earlier", None)
    while earlier:
        attempts, earlier = attempts + 1, earlier.get("earlier")
    return {
        "name": run.name,
        "variant": run.variant,
        "k": run.k,
        "seed": run.seed,
        "digest": run.config.digest,
        "command": ["asyncrl", *run.command],
        "attempts": attempts,
        "run_seconds": round(seconds, 1),
        "trained_samples": run.num_samples,
        "provenance": record,
    }


def _curve(
    run: PlannedRun, steps: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """Score against samples and seconds.

    Versions differ between runs: a generator that adopts two at once evaluates the later one.
    """
    seconds_of = {0: 0.0}
    clock_s = 0.0
    for index, record in enumerate(steps):
        clock_s += record["time/step_s"] if index else 0.0
        seconds_of[record["version"]] = clock_s
    return [
        {
            "version": e["version"],
            "samples": e["version"] * samples_per_step(run.config),
            "seconds": round(seconds_of[e["version"]], 3),
            "score": e["mean_score"],
            "num_samples": e["num_samples"],
        }
        for e in evals
    ]


def _staleness(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all trained tokens of the run."""
    tokens: Counter[int] = Counter()
    for record in steps:
        for name, count in record.items():
            metric, _, bucket = name.partition("@")
            if metric == "staleness/tokens":
                tokens[int(bucket)] += int(count)
    total = tokens.total()
    present = {age: count for age, count in sorted(tokens.items()) if count}
    return {
        "mean": round(sum(age * count for age, count in present.items()) / total, 4)
        if total
        else None,
        "max": max(present, default=None),
        "tokens": present,
    }


def area(places: Sequence[float], scores: Sequence[float], *, until: float | None = None) -> float:
    """Mean of the curve through the points, up to `until`: its trapezoid area over its width.

    Between points the curve is straight, after the last one it is constant. Places ascend (equal ones
    are a jump); with no width the last score is the mean.

    Raises:
        ValueError: no points.
    """
    if not places or len(places) != len(scores):
        raise ValueError(f"expected as many places as scores, got {len(places)} and {len(scores)}")
    end = places[-1] if until is None else until
    total = 0.0
    for left, right, low, high in zip(places, places[1:], scores, scores[1:], strict=False):
        width = min(right, end) - left
        if width > 0:
            at_end = low + (high - low) * width / (right - left)
            total += width * (low + at_end) / 2
    total += max(0.0, end - places[-1]) * scores[-1]
    return total / (end - places[0]) if end > places[0] else scores[-1]
