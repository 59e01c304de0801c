"""The file of a sweep: which runs, and how they share a host.

    base = "sweep_base.toml"            # a run's config, relative to this file
    out = "runs/staleness"              # every run, the result, the figures
    num_parallel = 2

    [set]                               # overrides of every run
    pipeline.num_steps = 100

    [variants.clipped_tis]              # overrides of a variant; a table may be empty
    [variants.uncorrected]
    algorithm.correction.kind = "none"

    [grid]                              # every combination of the axes, for each variant
    seed = [0, 1, 2, 3, 4]              # a key and its values, or a name and tables of keys ...
    staleness = [                       # ... that change together
        { pipeline.max_staleness = 0, pipeline.depth = 1 },
        { pipeline.max_staleness = 8, pipeline.depth = 9 },
    ]

Tables nest or have dotted keys, as one likes. Later ones win: base, set, variant, axes in their order
(the one of seeds first).
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from asyncrl.config.read import apply_override
from asyncrl.config.section import Section
from asyncrl.errors import ConfigError

Kept = Literal["metrics", "rollouts", "trace", "logs", "checkpoints"]

Overrides = dict[str, Any]
"""Values by dotted key, in the order in which they are applied."""


class SweepSettings(Section):
    """One sweep."""

    name: str = Field("sweep", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Also the W&B group of its runs."""

    base: str
    """Config of a run; a relative path counts from the sweep's file."""

    out: str = ""
    """Folder of the runs and the result; "" is runs/<name>. Called again, a sweep goes on there."""

    num_parallel: int = Field(1, ge=1)
    """Runs at a time. Each gets cores of its own, and GPUs of its own if there are as many."""

    keep: list[Kept] = ["metrics", "logs"]  # noqa: RUF012  (pydantic copies it)
    """What stays of a finished run besides its row, config, provenance and evaluations; "rollouts" are
    also the dropped ones."""

    set: Overrides = Field(default_factory=dict)
    variants: dict[str, Overrides] = Field({"base": {}}, min_length=1)
    grid: dict[str, list[Any]]

    @field_validator("set", "grid", mode="before")
    @classmethod
    def _flatten(cls, given: object) -> object:
        return flat(given) if isinstance(given, dict) else given

    @field_validator("variants", mode="before")
    @classmethod
    def _flatten_each(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        return {name: flat(v) if isinstance(v, dict) else v for name, v in given.items()}

    @field_validator("grid")
    @classmethod
    def _check_axes(cls, grid: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for name, values in grid.items():
            tables = [isinstance(value, dict) for value in values]
            if not values:
                raise ValueError(f"{name} has no values")
            if any(tables) and not all(tables):
                raise ValueError(f"{name} mixes values and tables of overrides; use one kind")
            if any(isinstance(value, dict) and not flat(value) for value in values):
                raise ValueError(
                    f"{name} has a table without overrides; give each of its tables a key and a value"
                )
        return grid

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        return Path(self.out or f"runs/{self.name}")

    def axes(self) -> list[list[Overrides]]:
        """The axes of the grid in file order, each as the overrides of its points."""
        return [
            [flat(value) if isinstance(value, dict) else {name: value} for value in values]
            for name, values in self.grid.items()
        ]


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepSettings:
    """Read a sweep's file and apply `key=value` overrides to it (`num_parallel=8`, `grid.seed=[0,1]`).

    Raises:
        ConfigError: no such file, not TOML, an unknown key, a bad value.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the sweep {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for item in overrides:
        apply_override(tree, item)
    if isinstance(tree.get("base"), str):
        tree["base"] = str(path.parent / tree["base"])
    try:
        return SweepSettings.model_validate(tree)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors(include_url=False)
        ]
        known = ", ".join(SweepSettings.model_fields)
        raise ConfigError(f"{path}: {'; '.join(faults)} (a sweep has: {known})") from error


def flat(tree: Mapping[str, Any], prefix: str = "") -> Overrides:
    """Nested tables as one table of dotted keys, in order."""
    found: Overrides = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
