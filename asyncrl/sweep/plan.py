"""From a sweep's settings to its runs; everything that can be wrong is found before one starts.

Invariants: the plan depends on the settings alone, so that every host and every restart finds the same
runs in the same folders; runs are compared only where they trained equally many samples of one task
and were evaluated alike; the shards i/n of a plan are disjoint and together are the plan.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import RunConfig, read_config
from asyncrl.config.text import toml_value
from asyncrl.errors import ConfigError
from asyncrl.sweep.settings import Overrides, SweepSettings

STALENESS = "pipeline.max_staleness"
_OWN_AXES = (STALENESS, "seed")
"""Axes that set one of these say which k and which seed; all others are part of the variant's name."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of the grid; `command` are the arguments of `asyncrl run`."""

    variant: str
    k: int
    seed: int
    run_dir: Path
    config: RunConfig
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """Unique in the sweep; the run's name and its folder's."""
        return self.config.name

    @property
    def num_samples(self) -> int:
        """Rollouts that it trains."""
        return samples_per_step(self.config) * self.config.pipeline.num_steps


def samples_per_step(config: RunConfig) -> int:
    """Rollouts of one step."""
    return config.pipeline.groups_per_step * config.pipeline.group_size


def plan_runs(settings: SweepSettings) -> list[PlannedRun]:
    """All runs of the sweep; seeds in the outermost loop, so that a part of it holds whole comparisons.

    Raises:
        ConfigError: a run's config is wrong, two runs have one name, or runs cannot be compared.
    """
    axes = settings.axes()
    axes.sort(key=lambda axis: "seed" not in axis[0])  # stable: the others stay in file order
    runs = [
        _planned(settings, name, overrides, point)
        for point in itertools.product(*axes)
        for name, overrides in settings.variants.items()
    ]
    _check_names(runs)
    _check_comparable(runs)
    return runs


def shard(runs: Sequence[PlannedRun], index: int, count: int) -> list[PlannedRun]:
    """Every `count`-th run from number `index` on.

    Raises:
        ConfigError: not 0 <= index < count.
    """
    if not 0 <= index < count:
        raise ConfigError(f"--shard {index}/{count}: expected I/N with 0 <= I < N")
    return list(runs[index::count])


def _planned(
    settings: SweepSettings, variant: str, overrides: Overrides, point: Iterable[Overrides]
) -> PlannedRun:
    """The run of one variant at one point of the grid."""
    merged = _after(settings.set, overrides)
    label = variant
    for table in point:
        merged = _after(merged, table)
        if not any(key in table for key in _OWN_AXES):
            key, value = next(iter(table.items()))
            label += f" {key}={value}"
    items = [f"{key}={toml_value(value)}" for key, value in merged.items()]
    bare = read_config(Path(settings.base), items)
    k, seed = bare.pipeline.max_staleness, bare.seed
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{label}-k{k}-s{seed}")
    run_dir = settings.folder / "runs" / name
    items += [
        f"name={toml_value(name)}",
        f"run_dir={toml_value(str(run_dir))}",
        f"telemetry.wandb_group={toml_value(settings.name)}",
    ]
    config = read_config(Path(settings.base), items)
    return PlannedRun(label, k, seed, run_dir, config, ("run", settings.base, *items))


def _after(first: Overrides, then: Overrides) -> Overrides:
    """Both, with the keys of `then` behind: a `kind` resets what was set of its section before it."""
    return {key: value for key, value in first.items() if key not in then} | then


def _check_names(runs: Sequence[PlannedRun]) -> None:
    seen: dict[str, PlannedRun] = {}
    for run in runs:
        if run.name in seen:
            raise ConfigError(
                f"two runs of the sweep are {run.name!r}: some axis of [grid] changes neither "
                f"{STALENESS} nor seed nor the variant's name, or holds a value twice"
            )
        seen[run.name] = run


def _check_comparable(runs: Sequence[PlannedRun]) -> None:
    """Equal trained samples everywhere; one task and one way of evaluation within a variant."""
    first = runs[0]
    firsts = {run.variant: run for run in reversed(runs)}
    for run in runs:
        if run.num_samples != first.num_samples:
            raise ConfigError(
                f"{run.name} would train {run.num_samples} samples and {first.name} "
                f"{first.num_samples}; runs are compared at equal samples: change pipeline.num_steps, "
                "groups_per_step or group_size"
            )
        peer = firsts[run.variant]
        for section in ("task", "eval", "model"):
            if getattr(run.config, section) != getattr(peer.config, section):
                raise ConfigError(
                    f"[{section}] of {run.name} and {peer.name} differ, which are to be compared; "
                    "set it in [set] or in a variant"
                )
