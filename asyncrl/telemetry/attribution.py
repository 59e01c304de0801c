"""Where the time went: every second of every process belongs to exactly one cause.

A second belongs to the innermost span that was open, or to "other"; so the parts of a process, or of all
processes of a kind, sum to the whole. Causes that the processes name:

| kind      | cause        | the process                                                            |
|-----------|--------------|------------------------------------------------------------------------|
| any       | start        | loads and joins, from its exec on; a generator: up to its first work   |
|           | other        | does what has no name here: bookkeeping, tokenizing, sending           |
| generator | decode       | one step of the engine; with vLLM, and on a GPU, prefill included      |
|           | prefill      | prompts go through the embedded engine on a CPU                        |
|           | eval         | as decode, prompts included, while an evaluation runs                  |
|           | adopt        | swaps weights, decoding stands still                                   |
|           | canary       | scores the fixed sequence after an adoption                            |
|           | wait_credit  | idle: the broker admits no group                                       |
|           | wait_score   | idle: all is sampled, verdicts are out                                 |
|           | wait_weights | idle without credit, a newer version being on its way                  |
| scorer    | score        | judges a completion (a worker process; "other" is idle)                |
| learner   | wait_batch   | has no batch; on ranks but the first: waits for that one too           |
|           | build        | advantages, packing, the staleness check                               |
|           | forward      | computes (on a GPU, which works behind, up to what it waits for)       |
|           | backward     | "                                                                      |
|           | optimizer    | "; here a GPU's results are waited for                                 |
|           | snapshot     | copies weights for publication                                         |
|           | probe        | log-probs of the canary's fixed sequence                               |
|           | checkpoint   | saves                                                                  |
|           | record       | writes rollouts and metrics                                            |
|           | eval         | waits for the evaluation after the last step                           |
| broker    | idle         | waits for a message; "other" is its work                               |

For a run folder:

    lives = read_lives(run_dir)                                (lives.py; [] without a trace)
    process_seconds(lives, window) -> {process: {cause: s}}    each sums to that process's time
    kind_shares(lives, window) -> {kind: {cause: share}}       each sums to 1
    training_window(lives) -> (start_s, end_s) | None          from the first batch to the last version
    run_times(run_dir) -> {"both_busy_s": ..., "shares": ...}  both sides at the same time; every process
    record_shares(record) -> {kind: {cause: share}}            of one line of metrics.jsonl
    bottleneck.diagnose(shares) -> Diagnosis                   which side waits, and what would help

`window` is (start_s, end_s) of the lives' clock, None for whole lives; a span that is open at its edge
counts up to it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.telemetry.lives import Life, Span, read_lives

Interval = tuple[float, float]
"""(start, end) in seconds."""

Shares = dict[str, dict[str, float]]
"""kind -> cause -> share of that kind's time, 0 .. 1; the shares of a kind sum to 1."""

KINDS = ("learner", "generator", "scorer", "broker")

LEARNER_BUSY = ("build", "forward", "backward", "optimizer")
GENERATOR_BUSY = ("decode", "prefill")


def exclusive(life: Life) -> Iterator[Span]:
    """The life cut into pieces, ascending, each named after the innermost span; they cover it once."""
    stack = [Span(f"{life.kind}/other", life.start_s, life.end_s)]
    reached_s = life.start_s
    for span in (*life.spans, Span("", life.end_s, life.end_s)):
        while len(stack) > 1 and stack[-1].end_s <= span.start_s:
            done = stack.pop()
            if done.end_s > reached_s:
                yield Span(done.name, reached_s, done.end_s)
                reached_s = done.end_s
        if span.start_s > reached_s:
            yield Span(stack[-1].name, reached_s, span.start_s)
            reached_s = span.start_s
        stack.append(span)


def attribute(life: Life, window: Interval | None = None) -> dict[str, float]:
    """Seconds by cause; they sum to the part of the life within `window`."""
    seconds: dict[str, float] = defaultdict(float)
    for piece in exclusive(life):
        start_s, end_s = piece.start_s, piece.end_s
        if window is not None:
            start_s, end_s = max(start_s, window[0]), min(end_s, window[1])
        if end_s > start_s:
            seconds[piece.cause] += end_s - start_s
    return dict(seconds)


def process_seconds(
    lives: Iterable[Life], window: Interval | None = None
) -> dict[str, dict[str, float]]:
    """Seconds by process and cause, over all lives of a process."""
    return _added((life.process, attribute(life, window)) for life in lives)


def kind_shares(lives: Iterable[Life], window: Interval | None = None) -> Shares:
    """Share of each cause in the time of all processes of a kind together."""
    return _divided(_added((life.kind, attribute(life, window)) for life in lives))


def totals_shares(now: Mapping[str, float], before: Mapping[str, float]) -> Shares:
    """The same from running totals "<kind>/<cause>" in seconds (Tracer.totals) at two moments.

    Names of another form are passed over, kinds whose time did not move are left out.
    """
    spent: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in now.items():
        kind, _, cause = name.partition("/")
        if kind in KINDS and cause:
            # A total may shrink by a little: a scorer's, once it is known when it was done.
            spent[kind][cause] = max(0.0, value - before.get(name, 0.0))
    return _divided(spent)


def share_values(shares: Shares) -> dict[str, float]:
    """Shares as metrics: share/<kind>@<cause>."""
    return {
        f"share/{kind}@{cause}": share
        for kind, causes in shares.items()
        for cause, share in causes.items()
    }


def record_shares(record: Mapping[str, object]) -> Shares:
    """Shares of one step, back from its line in metrics.jsonl; {} if it has none."""
    shares: Shares = defaultdict(dict)
    for name, value in record.items():
        if name.startswith("share/") and isinstance(value, float):
            kind, _, cause = name.removeprefix("share/").partition("@")
            shares[kind][cause] = value
    return dict(shares)


def training_window(lives: Iterable[Life]) -> Interval | None:
    """From the end of the learner's first wait for a batch to its last version; None without both.

    Start-up and the evaluations before and after training lie outside.
    """
    learners = [life for life in lives if life.kind == "learner"]
    waits = [s.end_s for life in learners for s in life.spans if s.cause == "wait_batch"]
    versions = [
        mark["ts"] / 1e6 for life in learners for mark in life.marks if mark["name"] == "version"
    ]
    if not waits or not versions or max(versions) <= min(waits):
        return None
    return min(waits), max(versions)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals, ascending."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def overlap_s(left: list[Interval], right: list[Interval]) -> float:
    """Seconds in which both unions were open; both must be merged and ascending."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        start_s = max(left[i][0], right[j][0])
        end_s = min(left[i][1], right[j][1])
        total += max(0.0, end_s - start_s)
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def run_times(run_dir: Path) -> dict[str, Any]:
    """Busy seconds of the learner and of all generators together, and seconds both were busy; and the
    share of each cause in the whole life of every process.

    Busy is LEARNER_BUSY, of any rank, and GENERATOR_BUSY. Empty if the run wrote no trace of one side
    (telemetry.trace=false, or it ended too early).
    """
    lives = read_lives(run_dir)
    if not {"learner", "generator"} <= {life.kind for life in lives}:
        return {}
    learner = _busy(lives, "learner", LEARNER_BUSY)
    generators = _busy(lives, "generator", GENERATOR_BUSY)
    return {
        "learner_busy_s": round(sum(end - start for start, end in learner), 3),
        "generators_busy_s": round(sum(end - start for start, end in generators), 3),
        "both_busy_s": round(overlap_s(learner, generators), 3),
        "shares": {
            process: {cause: round(share, 4) for cause, share in sorted(causes.items())}
            for process, causes in sorted(_divided(process_seconds(lives)).items())
        },
    }


def _busy(lives: Iterable[Life], kind: str, causes: Sequence[str]) -> list[Interval]:
    spans = (span for life in lives if life.kind == kind for span in life.spans)
    return merge((s.start_s, s.end_s) for s in spans if s.cause in causes)


def _added(parts: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    sums: dict[str, dict[str, float]] = {}
    for name, seconds in parts:
        mine = sums.setdefault(name, {})
        for cause, spent_s in seconds.items():
            mine[cause] = mine.get(cause, 0.0) + spent_s
    return sums


def _divided(seconds: Mapping[str, Mapping[str, float]]) -> Shares:
    sums = {name: sum(causes.values()) for name, causes in seconds.items()}
    return {
        name: {cause: spent_s / sums[name] for cause, spent_s in causes.items()}
        for name, causes in seconds.items()
        if sums[name] > 0
    }
