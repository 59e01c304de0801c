"""Which k is worse than synchronous training, in numbers and in words.

Endpoints, judged one by one for each variant: `final`, the held-out score after the last step, and
`area_samples`, the mean held-out score over training. Both are at equal trained samples.

The rule. Runs of one seed are a pair: d_k = endpoint at k - endpoint at the baseline, the smallest k of
the grid (0 in a proper sweep). From the largest k down, the 95 % Student interval of the mean of d_k over
seeds is looked at (intervals.py). While it excludes 0, k is "worse" (or "better") and the next smaller k
is looked at; the first k whose interval holds 0, and every k below it, is "open": not distinguishable.

Why no level is divided by the number of ks: the order is fixed beforehand, and a claim about k is made
only after those about all larger ones. Take the largest k that really does not differ: no false claim is
made unless its interval excludes 0, which happens in 5 % of sweeps. So one variant's claims about one
endpoint are all true with probability 95 % (Hsu and Berger, Journal of the American Statistical
Association 94, 1999, who so find the largest safe dose). The price: an effect at a middle k alone is
never claimed; it is named as a remark. Several variants and two endpoints are as many questions, each
with its own 5 %.

A k with a failed or missing run is not judged but named, with the cause: a run that diverged is a finding
and no number. Fewer than 3 seeds give no verdict.

Two things that the rule does not see are said beside it. A k that its runs did not come near (realized
mean staleness below REACHED of k) is named with the staleness that there was. Where the fall that could
hide is above VAGUE of the baseline's score, "not distinguishable" says nothing, and the sentence says so.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from asyncrl.sweep.intervals import Interval, t_interval
from asyncrl.sweep.row import Row

MIN_SEEDS = 3
REACHED = 0.75
VAGUE = 0.5
ENDPOINTS = {
    "final": "held-out score after training",
    "area_samples": "mean held-out score over training",
}

Status = Literal["worse", "better", "open", "failed", "missing", "few"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One k against the baseline; `interval` is None where it was not judged.

    `alone` says that a k that is "open" by the rule would be distinguished if it were looked at alone.
    """

    k: int
    status: Status
    interval: Interval | None = None
    alone: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One variant, one endpoint: a comparison for each k above the baseline, ascending."""

    variant: str
    endpoint: str
    baseline: int
    comparisons: tuple[Comparison, ...]
    sentence: str

    def as_json(self) -> dict[str, Any]:
        """Plain data, the intervals with their ends."""
        tree = asdict(self)
        for entry, comparison in zip(tree["comparisons"], self.comparisons, strict=True):
            if (found := comparison.interval) is not None:
                entry["interval"] |= {"low": found.low, "high": found.high}
        return tree


def judge(rows: Sequence[Row], planned: Iterable[tuple[str, int, int]]) -> list[Verdict]:
    """Every variant and endpoint; `planned` are (variant, k, seed) of the whole sweep."""
    cells: dict[str, dict[int, set[int]]] = {}
    for variant, k, seed in planned:
        cells.setdefault(variant, {}).setdefault(k, set()).add(seed)
    return [
        _judge_one(
            variant,
            endpoint,
            {k: ks[k] for k in sorted(ks)},
            [r for r in rows if r["variant"] == variant],
        )
        for variant, ks in cells.items()
        for endpoint in ENDPOINTS
    ]


def _judge_one(
    variant: str, endpoint: str, seeds: dict[int, set[int]], rows: Sequence[Row]
) -> Verdict:
    baseline, *others = seeds
    obstacles = {k: _obstacle(k, seeds[k], rows) for k in seeds}
    values = {(r["k"], r["seed"]): r[endpoint] for r in rows if r["outcome"] == "done"}
    comparisons: list[Comparison] = []
    claiming = True
    for k in reversed(others):
        paired = [s for s in sorted(seeds[k]) if (k, s) in values and (baseline, s) in values]
        obstacle = obstacles[baseline] or obstacles[k]
        if obstacle is None and len(paired) < MIN_SEEDS:
            obstacle = Comparison(k, "few", note=f"{len(paired)} seed{'s' * (len(paired) != 1)}")
        if obstacle is not None:
            comparisons.insert(0, Comparison(k, obstacle.status, note=obstacle.note))
            continue
        found = t_interval([values[k, s] - values[baseline, s] for s in paired])
        differs = found.high < 0 or found.low > 0
        claiming = claiming and differs
        direction: Status = "worse" if found.mean < 0 else "better"
        status: Status = direction if claiming else "open"
        comparisons.insert(0, Comparison(k, status, found, alone=differs and not claiming))
    words = _sentence(variant, endpoint, baseline, comparisons, obstacles[baseline], rows)
    return Verdict(variant, endpoint, baseline, tuple(comparisons), words)


def _obstacle(k: int, seeds: set[int], rows: Sequence[Row]) -> Comparison | None:
    """Why k cannot be judged: failed or missing runs."""
    here = {row["seed"]: row for row in rows if row["k"] == k}
    failed = [row for row in here.values() if row["outcome"] == "failed"]
    if failed:
        causes = "; ".join(sorted({row["cause"][:120] for row in failed}))
        return Comparison(k, "failed", note=f"{len(failed)} of {len(seeds)} runs failed: {causes}")
    if missing := len(seeds - here.keys()):
        return Comparison(k, "missing", note=f"{missing} of {len(seeds)} runs are missing")
    return None


def _sentence(
    variant: str,
    endpoint: str,
    baseline: int,
    comparisons: Sequence[Comparison],
    obstacle: Comparison | None,
    rows: Sequence[Row],
) -> str:
    head = f"{variant}, {ENDPOINTS[endpoint]}: "
    if not comparisons:
        return head + f"only k = {baseline}, nothing to compare."
    if obstacle is not None:
        return head + f"no verdict, because of k = {baseline}: {obstacle.note}."
    few = next((c for c in comparisons if c.status == "few"), None)
    if few is not None:
        return head + f"no verdict: k = {few.k} has {few.note} and at least {MIN_SEEDS} are needed."
    parts = []
    still_open = [c for c in comparisons if c.status == "open" and c.interval is not None]
    if still_open:
        scores = [r[endpoint] for r in rows if r["k"] == baseline and r["outcome"] == "done"]
        parts.append(_open_part(baseline, statistics.fmean(scores), still_open, comparisons))
    for c in comparisons:
        if c.interval is not None and c.status in ("worse", "better"):
            parts.append(f"k = {c.k} is {c.status} by {_size(c.interval)}")
        elif c.interval is None:
            parts.append(f"k = {c.k} is not judged ({c.note})")
    for c in still_open:
        if c.alone and c.interval is not None:
            word = "below" if c.interval.mean < 0 else "above"
            parts.append(
                f"k = {c.k} alone would lie {word} by {_size(c.interval)}, which the larger k do "
                "not confirm"
            )
    judged = [baseline, *(c.k for c in comparisons if c.interval is not None)]
    return head + "; ".join([*parts, *_unreached(judged, rows)]) + "."


def _open_part(
    baseline: int,
    score: float,
    still_open: Sequence[Comparison],
    comparisons: Sequence[Comparison],
) -> str:
    """What is not distinguishable, and how large a fall from the baseline's `score` it could hide."""
    seeds = min(c.interval.num for c in still_open if c.interval is not None)
    hidden = max(-c.interval.low for c in still_open if c.interval is not None)
    top = still_open[-1].k
    unjudged = [c.k for c in comparisons if c.k < top and c.interval is None]
    which = f"k <= {top}" if not unjudged else "k = " + ", ".join(str(c.k) for c in still_open)
    text = f"{which} is not distinguishable from k = {baseline} at this size ({seeds} seeds"
    if hidden <= 0:
        return text + ")"
    if hidden > VAGUE * abs(score):
        return text + f"; nothing is excluded: a fall of {hidden:.3f} from {score:.3f})"
    return text + f"; a fall of {hidden:.3f} is not excluded)"


def _unreached(ks: Sequence[int], rows: Sequence[Row]) -> list[str]:
    """The realized staleness of every k that its runs stayed well below."""
    parts = []
    for k in ks:
        found = [r["staleness"] for r in rows if r["k"] == k and r["outcome"] == "done"]
        ages = [age for age in found if age["mean"] is not None]
        if ages and (mean := statistics.fmean(age["mean"] for age in ages)) < REACHED * k:
            oldest = max(age["max"] for age in ages)
            parts.append(f"realized staleness at k = {k}: {mean:.1f} on average, {oldest} at most")
    return parts


def _size(interval: Interval) -> str:
    return f"{abs(interval.mean):.3f} +- {interval.half_width:.3f}"
