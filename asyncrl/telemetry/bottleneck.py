"""Which side of a run waits, for what, and what would help: a pure function of the shares of time.

The learner loses wait_batch; what the generators did with their time meanwhile is what it waited for.
When it loses nothing, generators that wait for credit wait for the learner. So each candidate costs the
run at most

    generation   min(wait_batch, decode + prefill)           learner     min(wait_credit, 1 - wait_batch
    scoring      min(wait_batch, wait_score)                                              - checkpoint)
    weights      min(wait_batch, wait_weights + adopt        checkpoint  min(wait_credit, checkpoint)
                                 + canary)
    evaluation   min(wait_batch, eval)                       overhead    min(wait_batch, other)
    turns        min(wait_batch, wait_credit): each side waits for the other, in turn

(left factors of the learner's time, right ones of the generators'; start-up is taken out of both), and
the largest is named. "turns" is no process, so it wins only when the two sides pass more time in it than
one of them alone explains. With a trace the minima over wait_batch are known better: wait_batch times the
share that a cause has in the generators' time while the learner waits. Sums over a step do not tell what
happened at the same time; there the sentence names, after the largest, what else may have cost more.

Start-up is left in, and is a candidate by itself, when the learner has none in its time: it trains, and
waits for engines that come late or were started again. If that does not cost most, it is taken out.

    start        min(wait_batch, start)

If learner or generation limit a run of N GPUs, each of which serves one side, work is counted in GPUs
that are busy, W = GPUs of a side * share of time in which it does not wait. If a side's work divides
evenly among its GPUs, both sides are always busy when the learner has N * W_l / (W_l + W_g) of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from asyncrl.telemetry.alerts import about_staleness

Limit = Literal[
    "none", "learner", "checkpoint", "generation", "scoring", "weights", "evaluation", "overhead",
    "turns", "start",
]  # fmt: skip

QUIET = 0.1
"""A share of time below which a loss is not worth a sentence."""

EVEN = 0.75
"""Turns are named when they cost more than this part of the largest other candidate, and EVEN_LEAST."""

EVEN_LEAST = 0.25

IDLE = 1.25
"""Sides whose waits add up to more than this do not only take turns: both wait at once."""


_WAITED_FOR: dict[Limit, tuple[str, ...]] = {
    "generation": ("decode", "prefill"),
    "scoring": ("wait_score",),
    "weights": ("wait_weights", "adopt", "canary"),
    "evaluation": ("eval",),
    "overhead": ("other",),
    "turns": ("wait_credit",),
}
"""What generators do while the learner waits, by what is then said to limit the run."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What limits a run."""

    limit: Limit
    cost: float
    """Share of the waiting side's time that it costs at most, 0 .. 1."""

    text: str
    """One line, with the settings to change."""


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of each side; none serves both."""

    learner: int
    generators: int


def diagnose(
    shares: Mapping[str, Mapping[str, float]],
    split: Split | None = None,
    *,
    meanwhile: Mapping[str, float] | None = None,
    alerts: Iterable[str] = (),
) -> Diagnosis:
    """Name what limits a run.

    Args:
        shares: kind -> cause -> share of that kind's time (attribution.kind_shares and others);
            without learner or generators there is nothing to compare, and the limit is "none".
        split: of the run's GPUs, if there is one.
        meanwhile: cause -> share of the generators' time in the seconds in which the learner had no
            batch, from a trace: what it waited for, where `shares` alone only bound it.
        alerts: names of the alerts that are on; more staleness is not advised without naming those that
            speak against it.
    """
    if (late := _late(shares.get("learner", {}), shares.get("generator", {}))) is not None:
        return late
    learner, generator = _running(shares.get("learner")), _running(shares.get("generator"))
    if not learner or not generator:
        return Diagnosis("none", 0.0, "only one side has run so far")
    costs = _costs(learner, generator)
    if meanwhile:
        costs |= {name: learner.get("wait_batch", 0.0) * part for name, part in _parts(meanwhile)}
    turns = costs.pop("turns")
    limit: Limit = max(costs, key=lambda name: costs[name])
    cost = costs[limit]
    if turns >= EVEN_LEAST and turns > EVEN * cost:
        limit, cost = "turns", turns
    if cost < QUIET:
        return Diagnosis("none", cost, f"neither side waits for more than {QUIET:.0%} of its time")
    text = _SENTENCES[limit](learner, generator, shares.get("scorer", {}))
    if against := about_staleness(alerts):
        text = text.replace(
            _STALER, f"{_STALER}, but alerts speak against it: {', '.join(against)}"
        )
    if not meanwhile and (others := _others(limit, learner, generator)):
        text += f", if not {' or '.join(others)}"
    if split is not None and limit in ("learner", "generation"):
        text += _better(split, learner, generator)
    return Diagnosis(limit, cost, text)


def _late(learner: Mapping[str, float], generator: Mapping[str, float]) -> Diagnosis | None:
    """Generators that start up while the learner trains; None if that is not what costs most."""
    start = generator.get("start", 0.0)
    cost = min(learner.get("wait_batch", 0.0), start)
    if learner.get("start") or cost < max(QUIET, *_costs(learner, generator).values()):
        return None
    return Diagnosis(
        "start", cost, f"{_waits(learner)}, generators start up {start:.0%}: see logs/"
    )


def _running(causes: Mapping[str, float] | None) -> dict[str, float]:
    """The same without start-up; {} if nothing is left."""
    rest = {name: share for name, share in (causes or {}).items() if name != "start"}
    total = sum(rest.values())
    return {name: share / total for name, share in rest.items()} if total > 0 else {}


def _costs(learner: Mapping[str, float], generator: Mapping[str, float]) -> dict[Limit, float]:
    waits, credit = learner.get("wait_batch", 0.0), generator.get("wait_credit", 0.0)
    saves = learner.get("checkpoint", 0.0)

    return {
        "learner": min(credit, 1.0 - waits - saves),
        "checkpoint": min(credit, saves),
        **{name: min(waits, part) for name, part in _parts(generator)},
    }


def _parts(generator: Mapping[str, float]) -> Iterator[tuple[Limit, float]]:
    """What a learner without a batch may wait for, and its share of the generators' time."""
    for name, causes in _WAITED_FOR.items():
        yield name, sum(generator.get(cause, 0.0) for cause in causes)


def _others(
    limit: Limit, learner: Mapping[str, float], generator: Mapping[str, float]
) -> list[str]:
    """What else, by these sums, the learner may have waited for longer than for `limit`.

    Of the time in which it waits, a cause may fill all that it has, and `limit` as little as does not fit
    into the rest of the time.
    """
    parts, waits = dict(_parts(generator)), learner.get("wait_batch", 0.0)
    del parts["turns"]  # no process; named by a rule of its own
    if limit not in parts:
        return []
    if limit == "generation":
        del parts["overhead"]  # the same helps: another generator
    least = max(0.0, parts.pop(limit) + waits - 1.0)
    most = {name: min(waits, part) for name, part in parts.items()}
    return [_NAMES.get(name, name) for name, cost in most.items() if cost >= QUIET and cost > least]


_NAMES: dict[Limit, str] = {"weights": "the weight path", "overhead": "bookkeeping"}
"""As the sentences say it, where they have another word."""

_Causes = Mapping[str, float]

_STALER = "a larger pipeline.max_staleness or pipeline.depth"


def _learner(_learner: _Causes, generator: _Causes, _scorer: _Causes) -> str:
    return (
        f"generators wait for credit {generator['wait_credit']:.0%}: the learner is the bottleneck "
        "(more learner GPUs, or fewer tokens per step)"
    )


def _checkpoint(learner: _Causes, generator: _Causes, _scorer: _Causes) -> str:
    return (
        f"generators wait for credit {generator['wait_credit']:.0%}, the learner saves "
        f"{learner['checkpoint']:.0%}: checkpoints are the bottleneck (checkpoint.every_steps)"
    )


def _generation(learner: _Causes, _generator: _Causes, _scorer: _Causes) -> str:
    return (
        f"{_waits(learner)}: generation is the bottleneck (another generator, with vLLM "
        f"engine.engines_per_gpu, {_STALER})"
    )


def _scoring(learner: _Causes, generator: _Causes, scorer: _Causes) -> str:
    busy = scorer.get("score", 1.0)
    # Workers that are mostly idle while all wait: single verdicts take long, more hands do not help.
    help_ = (
        "scoring.num_workers" if busy >= 0.5 else f"a faster scorer; its processes: {busy:.0%} busy"
    )
    return (
        f"{_waits(learner)}, generators for scores {generator['wait_score']:.0%}: scoring is the "
        f"bottleneck ({help_})"
    )


def _weights(learner: _Causes, generator: _Causes, _scorer: _Causes) -> str:
    transit, adopt = generator.get("wait_weights", 0.0), generator.get("adopt", 0.0)
    if adopt > transit:
        return f"{_waits(learner)}, weights: adoption stalls generators {adopt:.0%} (larger steps)"
    return (
        f"{_waits(learner)}, generators for weights {transit:.0%}: the weight path is the bottleneck "
        f"(weights.transport, weights.chunk_bytes, weights.chunks_in_flight, {_STALER})"
    )


def _evaluation(learner: _Causes, generator: _Causes, _scorer: _Causes) -> str:
    return (
        f"{_waits(learner)}, generators evaluate {generator['eval']:.0%}: evaluation is the bottleneck "
        "(eval.every_steps, eval.num_prompts)"
    )


def _overhead(learner: _Causes, generator: _Causes, _scorer: _Causes) -> str:
    return (
        f"{_waits(learner)}, generators are outside of their engine {generator['other']:.0%}: "
        "bookkeeping is the bottleneck (another generator)"
    )


def _turns(learner: _Causes, generator: _Causes, _scorer: _Causes) -> str:
    credit = generator["wait_credit"]
    both = f"{_waits(learner)}, generators for credit {credit:.0%}"
    if learner["wait_batch"] + credit > IDLE:
        return f"{both}, both at once: publishing and messages are the bottleneck ({_STALER})"
    return f"{both}: they take turns ({_STALER})"


def _better(split: Split, learner: _Causes, generator: _Causes) -> str:
    """What of the same GPUs would keep both sides busy; "" if that is what they have."""
    idle = sum(share for cause, share in generator.items() if cause.startswith("wait_"))
    trains = split.learner * (1.0 - learner.get("wait_batch", 0.0))
    samples = split.generators * (1.0 - idle)
    total = split.learner + split.generators
    if trains + samples <= 0.0:
        return ""
    best = min(total - 1, max(1, round(total * trains / (trains + samples))))
    if best == split.learner:
        return ""
    return (
        f"; of these {total} GPUs about {best} for the learner and {total - best} for generators would "
        f"balance, now {split.learner} and {split.generators}"
    )


def _waits(learner: _Causes) -> str:
    return f"learner waits for batches {learner['wait_batch']:.0%}"


_SENTENCES: dict[Limit, Callable[[_Causes, _Causes, _Causes], str]] = {
    "learner": _learner,
    "checkpoint": _checkpoint,
    "generation": _generation,
    "scoring": _scoring,
    "weights": _weights,
    "evaluation": _evaluation,
    "overhead": _overhead,
    "turns": _turns,
}
