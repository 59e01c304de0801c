"""Collects what a page shows from a run folder, whether the run has ended, goes on, or died.

| from           | what                                                                          |
|----------------|-------------------------------------------------------------------------------|
| metrics.jsonl  | curves, staleness, mismatch by staleness, shares of time, ledger, alerts      |
| evals.jsonl    | held-out scores by version                                                    |
| rollouts.jsonl | the browser; every token of the groups that were recorded so                  |
| drops.jsonl    | groups that were not trained, and why; the newest MAX_DROPS                    |
| trace/         | each process's seconds by cause                                               |
| run.json, summary.json, config.toml | where it came from, how it ended, with what settings     |

A last line that is not whole yet is left out; a line in the middle that is not JSON is an error.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.telemetry.attribution import process_seconds, record_shares
from asyncrl.telemetry.bottleneck import diagnose
from asyncrl.telemetry.lives import read_lives
from asyncrl.telemetry.metrics import METRICS

CURVES = (
    "reward/mean", "loss/policy", "mismatch/k3", "mismatch/ess", "correction/ess", "kl/k3",
    "policy/entropy", "optimizer/grad_norm", "staleness/mean", "staleness/max",
    "rate/trained_tokens_per_s", "rate/sampled_tokens_per_s", "time/step_s", "tokens/completion_mean",
    "groups/frac_mixed", "staleness/queued_s",
)  # fmt: skip
BY_STALENESS = ("mismatch/k3", "mismatch/abs", "mismatch/ess", "correction/ess")
LEDGER = (
    "ledger/admitted", "ledger/trained", "ledger/dropped_stale", "ledger/dropped_filtered",
    "ledger/failed", "ledger/queued", "ledger/in_flight",
)  # fmt: skip
LEARNER_TIMES = (
    "wait_batch", "build", "forward", "backward", "optimizer", "probe", "snapshot", "checkpoint",
    "record",
)  # fmt: skip

MAX_DROPS = 2000

Row = dict[str, Any]


def collect(run_dir: Path, *, max_rollouts: int) -> Row:
    """Everything that the page shows, ready for JSON.

    Args:
        run_dir: the folder of `asyncrl run`.
        max_rollouts: of more, whole groups are left out, evenly over the run.

    Raises:
        ConfigError: no record of a step in this folder, or a record that is not JSON.
    """
    steps = read_lines(run_dir / "metrics.jsonl")
    if not steps:
        raise ConfigError(
            f"{run_dir} has no record of a step (metrics.jsonl): not a run's folder, or nothing was "
            "trained yet; logs/ says why"
        )
    rollouts = read_lines(run_dir / "rollouts.jsonl")
    kept = thin(rollouts, max_rollouts)
    shares = [record_shares(step) for step in steps]
    return {
        "name": run_dir.resolve().name,
        "run": _object(run_dir / "run.json"),
        "summary": _object(run_dir / "summary.json"),
        "config": _text(run_dir / "config.toml"),
        "meanings": {name: [metric.unit, metric.meaning] for name, metric in METRICS.items()},
        "steps": [step["step"] for step in steps],
        "curves": {name: _column(steps, name) for name in CURVES if _has(steps, name)},
        "evals": [[e["version"], e["mean_score"]] for e in read_lines(run_dir / "evals.jsonl")],
        "staleness": _by_staleness(steps, "staleness/tokens", sum),
        "by_staleness": {name: _by_staleness(steps, name, _mean) for name in BY_STALENESS},
        "shares": shares,
        "why": [why(step, share) for step, share in zip(steps, shares, strict=True)],
        "diagnosis": diagnose(_mean_shares(shares)).text,
        "processes": process_seconds(read_lives(run_dir)),
        "ledger": {name: _column(steps, name) for name in LEDGER if _has(steps, name)},
        "alerts": [[step["step"], text] for step in steps for text in step.get("new_alerts", [])],
        "num_rollouts": len(rollouts),
        "rollouts": kept,
        "drops": read_lines(run_dir / "drops.jsonl")[-MAX_DROPS:],
    }


def read_lines(path: Path) -> list[Row]:
    """The JSON objects of a file; [] if there is none.

    Raises:
        ConfigError: a line but the last is not JSON.
    """
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()
    found: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(
                    f"{path}:{number} is not JSON ({error}); restore the file"
                ) from error
    return found


def thin(rollouts: Sequence[Row], limit: int) -> Sequence[Row]:
    """At most `limit` rollouts: whole groups, evenly spaced over the run."""
    if len(rollouts) <= limit:
        return rollouts
    groups: dict[tuple[int, int], list[Row]] = {}
    for rollout in rollouts:
        groups.setdefault((rollout["step"], rollout["group_id"]), []).append(rollout)
    largest = max(len(group) for group in groups.values())
    num = max(1, min(len(groups), limit // largest))
    wanted = [index * len(groups) // num for index in range(num)]
    ordered = list(groups.values())
    return [rollout for index in wanted for rollout in ordered[index]]


def why(step: Mapping[str, Any], shares: Mapping[str, Mapping[str, float]]) -> Row:
    """What a step's time went into: the learner's largest parts, and the generators' meanwhile."""
    total_s = step.get("time/step_s", 0.0)
    parts = {name: step.get(f"time/{name}_s", 0.0) for name in LEARNER_TIMES}
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    text = ", ".join(f"{name} {parts[name]:.3g} s" for name in largest if parts[name] > 0)
    generators = shares.get("generator", {})
    doing = sorted(generators, key=lambda cause: -generators[cause])[:2]
    if doing:
        meanwhile = ", ".join(f"{cause} {generators[cause]:.0%}" for cause in doing)
        text += f"; generators: {meanwhile}"
    return {
        "step": step["step"],
        "seconds": total_s,
        "text": text,
        "limit": step.get("bottleneck", ""),
        "skipped": step.get("skipped", ""),
    }


def _has(steps: Iterable[Row], name: str) -> bool:
    return any(name in step for step in steps)


def _column(steps: Iterable[Row], name: str) -> list[float | None]:
    return [step.get(name) for step in steps]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _by_staleness(
    steps: Iterable[Row], name: str, reduce: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """By staleness: `reduce` of the steps' values of `name`@staleness."""
    found: dict[int, list[float]] = {}
    for step in steps:
        for key, value in step.items():
            base, at, staleness = key.partition("@")
            if base == name and at:
                found.setdefault(int(staleness), []).append(value)
    return {str(staleness): reduce(found[staleness]) for staleness in sorted(found)}


def _mean_shares(
    shares: Sequence[Mapping[str, Mapping[str, float]]],
) -> dict[str, dict[str, float]]:
    """Mean over the steps that have shares; the first has the start in it."""
    present = [share for share in shares[1:] or shares if share]
    total: dict[str, dict[str, float]] = {}
    for share in present:
        for kind, causes in share.items():
            for cause, value in causes.items():
                sums = total.setdefault(kind, {})
                sums[cause] = sums.get(cause, 0.0) + value / len(present)
    return total


def _object(path: Path) -> Row:
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    return found


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
