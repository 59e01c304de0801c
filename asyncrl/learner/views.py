"""What W&B shows beside the curves of a step: histograms by staleness, and a table of rollouts.

Histograms are of counts that the step made anyway; their names are not metrics (telemetry/metrics.py),
since they are no numbers:

    histogram/staleness      trained tokens by staleness
    histogram/log_ratio@d    log pi_prox - log mu of the tokens of staleness d
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.algo.diagnostics import BIN_VALUES

MAX_BARS = 64
MAX_ROWS = 32

_COLUMNS = (
    "step", "group_id", "index", "prompt", "text", "answer", "score", "advantage", "fate", "num_tokens",
)  # fmt: skip


def histograms(
    record: Mapping[str, Any], ratio_bins: NDArray[np.float64] | None
) -> dict[str, tuple[list[float], list[float]]]:
    """Counts and edges by name, of a step's record and its StepResult.ratio_bins."""
    found = {}
    prefix = "staleness/tokens@"
    by_age = {
        int(k.removeprefix(prefix)): float(v) for k, v in record.items() if k.startswith(prefix)
    }
    if by_age:
        ages = range(max(by_age) + 1)
        counts = [by_age.get(age, 0.0) for age in ages]
        found["histogram/staleness"] = (counts, [age - 0.5 for age in (*ages, len(ages))])
    for age, counts_ in enumerate(ratio_bins if ratio_bins is not None else ()):
        if counts_.sum() > 0:
            found[f"histogram/log_ratio@{age}"] = _ratios(counts_)
    return found


def _ratios(counts: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """The occupied part of diagnostics' bins, several of them to a bar if there are many."""
    middle = (BIN_VALUES[1:] + BIN_VALUES[:-1]) / 2
    edges = np.concatenate([BIN_VALUES[:1], middle, BIN_VALUES[-1:]])
    occupied = np.flatnonzero(counts)
    first, last = int(occupied[0]), int(occupied[-1]) + 1
    starts = np.arange(first, last, -(-(last - first) // MAX_BARS))
    bars = np.add.reduceat(counts[:last], starts)
    return bars.tolist(), [*edges[starts].tolist(), float(edges[last])]


def rollout_table(lines: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Column names and at most MAX_ROWS rollouts (lines of rollouts.jsonl), staleness of each last."""
    rows = []
    for line in lines[:MAX_ROWS]:
        spans = line["version_spans"]
        staleness = line["step"] - spans[0][0] if spans else None
        rows.append([*(line.get(name) for name in _COLUMNS), staleness])
    return [[*_COLUMNS, "staleness"], *rows]
