"""How many engines a GPU should have, chosen from measured decode steps; no measuring here.

A step of r completions takes an engine wall(r) seconds, and keeps the GPU busy for busy(r) of them. n
engines that share C completions have r = C / n each. Their host loops run side by side, each on a core;
the GPU is taken to serve one engine at a time. So a step of all of them takes

    step(n) = max(wall(C / n), n * busy(C / n)),      rate(n) = C / step(n)   tokens a second.

Chosen is the fewest engines that no other possible number beats by more than MIN_GAIN: every engine costs
a copy of the weights, a core and a start. What the model leaves out: kernels that overlap (mps.py), and,
the other way, engines that contend for the host's memory, and a learner on the same GPU.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.config import RunConfig

COUNTS = (1, 2, 3, 4)
"""Numbers of engines that are tried."""

MIN_GAIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """So many engines, and what one of them measured."""

    engines: int
    rows: int
    """Completions of each engine."""

    wall_s: float = 0.0
    """One decode step of one engine that is alone; 0 where it was not measured."""

    busy_s: float = 0.0
    """How long the GPU computed for it."""

    obstacle: str = ""
    """Why this number cannot be had; empty if it can, and then it was measured."""

    @property
    def rate(self) -> float:
        """Predicted tokens a second of all engines; 0 where nothing was measured."""
        step_s = max(self.wall_s, self.engines * self.busy_s)
        return self.engines * self.rows / step_s if step_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The number, why, and what it was chosen from."""

    engines: int
    sentence: str
    options: tuple[Option, ...]

    def record(self) -> dict[str, Any]:
        """For the run's folder."""
        rows = [asdict(option) | {"rate": option.rate} for option in self.options]
        return {"engines": self.engines, "sentence": self.sentence, "options": rows}


def choose(options: Sequence[Option]) -> Choice:
    """The fewest engines within MIN_GAIN of the best that can be had.

    Raises:
        ValueError: one engine is not among the options, or cannot be had.
    """
    possible = sorted((o for o in options if not o.obstacle), key=lambda option: option.engines)
    if not possible or possible[0].engines != 1:
        raise ValueError("one engine must be among the options, without an obstacle")
    best = max(option.rate for option in possible)
    chosen = next(option for option in possible if option.rate * (1 + MIN_GAIN) >= best)
    return Choice(
        engines=chosen.engines,
        sentence=_sentence(chosen, possible, options),
        options=tuple(options),
    )


def _sentence(chosen: Option, possible: Sequence[Option], options: Sequence[Option]) -> str:
    alone = possible[0]
    text = f"engine.engines_per_gpu={chosen.engines}: {chosen.rate:,.0f} tokens/s predicted"
    if chosen is not alone:
        text += f", {chosen.rate / alone.rate:.2f} times one engine"
    if rest := [option for option in possible if option.engines > chosen.engines]:
        other = max(rest, key=lambda option: option.rate)
        text += f"; {other.engines} would give {other.rate / chosen.rate - 1:+.0%}"
    refused = [o for o in options if o.obstacle and o.engines > chosen.engines]
    if refused:
        text += f"; {refused[0].engines} cannot be had: {refused[0].obstacle}"
    return text


def table(options: Sequence[Option]) -> str:
    """The options for people, one line each."""
    lines = [f"{'engines':>7} {'rows':>6} {'step ms':>8} {'busy ms':>8} {'tokens/s':>9}"]
    for option in options:
        lines.append(
            f"{option.engines:7} {option.rows:6} {option.wall_s * 1e3:8.2f} "
            f"{option.busy_s * 1e3:8.2f} {option.rate:9,.0f}  {option.obstacle}".rstrip()
        )
    return "\n".join(lines)


def rows_each(config: RunConfig, engines: int) -> int:
    """What each of `engines` gets of max_concurrent_completions: whole groups, rounded up."""
    total, size = config.engine.max_concurrent_completions, config.pipeline.group_size
    groups = math.ceil(total / engines / size)
    return min(total, max(groups * size, config.eval.samples_per_prompt))


def settled(config: RunConfig, record: Mapping[str, Any]) -> RunConfig:
    """The run with the number of a `Choice.record` in place of "auto", and the completions divided."""
    engines = int(record["engines"])
    changes = {
        "engines_per_gpu": engines,
        "max_concurrent_completions": rows_each(config, engines),
    }
    return config.model_copy(update={"engine": config.engine.model_copy(update=changes)})
