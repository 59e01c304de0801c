"""Why a step took as long as it did: its seconds by cause against the usual ones.

Usual is the median of up to 10 steps on each side, cause by cause. A step is slow if it took 1.5 times
that. What the learner waited for is told by what the generators did meanwhile.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.telemetry.bottleneck import Diagnosis, diagnose

SLOW = 1.5
_NEIGHBOURS = 10
_LEAST = 0.1
"""Share of the excess, or of the generators' time, below which a cause is not mentioned."""

_DOING = {
    "wait_batch": "waiting for its batch", "build": "building the batch", "forward": "forward passes",
    "backward": "backward passes", "optimizer": "the optimizer", "snapshot": "copying weights",
    "checkpoint": "saving a checkpoint", "record": "writing records", "eval": "evaluating",
    "decode": "decoding", "prefill": "prefilling", "adopt": "adopting weights",
    "wait_credit": "waiting for credit", "wait_score": "waiting for scores",
    "wait_weights": "waiting for weights", "start": "starting up", "other": "other work",
}  # fmt: skip

Kinds = Mapping[str, Mapping[str, float]]
"""kind -> cause -> seconds."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step's time."""

    seconds: float
    usual_s: float
    slow: bool
    text: str


def explain(
    steps: Sequence[Kinds],
    *,
    alerts: Sequence[Sequence[str]] | None = None,
    meanwhile: Sequence[Mapping[str, float]] | None = None,
) -> list[StepTime]:
    """One explanation a step; a step without the learner's causes took no known time.

    Args:
        steps: seconds by kind and cause.
        alerts: of each step the names of those that were on.
        meanwhile: of each step what generators did while the learner had no batch, as shares; {} if
            that is not known (bottleneck.diagnose).
    """
    seconds = [sum(kinds.get("learner", {}).values()) for kinds in steps]
    limits = [
        diagnose(
            _shares(kinds),
            alerts=alerts[index] if alerts else (),
            meanwhile=meanwhile[index] if meanwhile else None,
        )
        for index, kinds in enumerate(steps)
    ]
    return [_explain(steps, seconds, index, limits[index]) for index in range(len(steps))]


def _explain(
    steps: Sequence[Kinds], seconds: Sequence[float], index: int, limit: Diagnosis
) -> StepTime:
    around = [
        i
        for i in range(max(0, index - _NEIGHBOURS), min(len(steps), index + _NEIGHBOURS + 1))
        if i != index and seconds[i] > 0
    ]
    mine_s = seconds[index]
    if mine_s == 0 or not around:
        return StepTime(mine_s, mine_s, False, _sentence(steps[index], {}, limit))
    usual_s = statistics.median(seconds[i] for i in around)
    names = {name for i in (*around, index) for name in steps[i].get("learner", {})}
    usual = {
        name: statistics.median(steps[i].get("learner", {}).get(name, 0.0) for i in around)
        for name in names
    }
    slow = mine_s > SLOW * usual_s
    text = f"{_time(mine_s)}, usual are {_time(usual_s)}"
    if usual_s > 0 and slow:
        text = f"{_time(mine_s)}, {mine_s / usual_s:.1f} times the usual {_time(usual_s)}"
    why = _sentence(steps[index], usual, limit, slow=slow)
    return StepTime(mine_s, usual_s, slow, f"{text}. {why}")


def _sentence(
    kinds: Kinds, usual: Mapping[str, float], limit: Diagnosis, *, slow: bool = False
) -> str:
    learner, generator = kinds.get("learner", {}), kinds.get("generator", {})
    parts = []
    if slow:
        excess = {name: s - usual.get(name, 0.0) for name, s in learner.items()}
        total_s = sum(s for s in excess.values() if s > 0)
        more = sorted((-s, name) for name, s in excess.items() if s > _LEAST * total_s)
        parts.append(
            "More than usual: "
            + ", ".join(f"{_time(-s)} {_DOING.get(name, name)}" for s, name in more)
        )
        if "wait_batch" in [name for _, name in more] and generator:
            parts.append("meanwhile the generators spent " + _spent(generator))
    if limit.limit != "none":
        parts.append(limit.text)
    return ("; ".join(parts) + ".") if parts else "Neither side waited much."


def _spent(causes: Mapping[str, float]) -> str:
    total_s = sum(causes.values())
    main = sorted((-s, name) for name, s in causes.items() if s > _LEAST * total_s)
    return ", ".join(f"{-s / total_s:.0%} {_DOING.get(name, name)}" for s, name in main)


def _shares(kinds: Kinds) -> dict[str, dict[str, float]]:
    totals = {kind: sum(causes.values()) for kind, causes in kinds.items()}
    return {
        kind: {name: s / totals[kind] for name, s in causes.items()}
        for kind, causes in kinds.items()
        if totals[kind] > 0
    }


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.995 else f"{seconds:.1f} s"
