"""`asyncrl dashboard`: a saved W&B workspace whose sections answer one question each.

The sections are those of `asyncrl metrics` (telemetry/listing.py), so a metric that is declared has a
panel and no panel can name one that is not. A metric by staleness or cause ("@...") is one panel with a
curve for each. Saving needs the optional package wandb-workspaces, and a W&B login.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.telemetry.listing import SECTIONS
from asyncrl.telemetry.metrics import METRICS

_LOG_SCALE = ("mismatch/k3", "mismatch/abs", "mismatch/chi2", "optimizer/grad_norm", "drift/k3")

_NUM_OPEN = 3
"""Sections that are not folded at first."""

_BUCKETED = frozenset(
    {
        "staleness/tokens", "share/learner", "share/generator", "share/scorer", "share/broker",
        "mismatch/k1", "mismatch/k3", "mismatch/abs", "mismatch/exp_abs", "mismatch/tokens",
        "mismatch/ess", "mismatch/chi2", "mismatch/abs_p99", "correction/ess",
    }
)  # fmt: skip
"""Metrics whose "@..." curves get a panel of their own."""


@dataclass(frozen=True, slots=True)
class PanelPlan:
    """One line plot."""

    title: str
    metrics: tuple[str, ...]
    """Exact names; empty if `pattern` chooses."""

    pattern: str
    """Regular expression of names; "" if `metrics` are given."""

    x: str
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """Panels under one heading."""

    name: str
    panels: tuple[PanelPlan, ...]


def plan() -> tuple[SectionPlan, ...]:
    """The workspace's sections, from the table of metrics."""
    section_of = {part: name for name, parts in SECTIONS.items() for part in parts}
    panels: dict[str, list[PanelPlan]] = {name: [] for name in (*SECTIONS, "more")}
    for name in METRICS:
        place = panels[section_of.get(name.partition("/")[0], "more")]
        if not name.startswith("share/"):  # which only has causes
            place.append(_panel(name))
        if name in _BUCKETED:
            place.append(_by_bucket(name))
    return tuple(SectionPlan(name, tuple(found)) for name, found in panels.items() if found)


def _panel(name: str) -> PanelPlan:
    metric = METRICS[name]
    unit = f" [{metric.unit}]" if metric.unit != "1" else ""
    x = "eval/version" if name.startswith("eval/") else "step"
    return PanelPlan(f"{name}{unit}", (name,), "", x, name in _LOG_SCALE)


def _by_bucket(name: str) -> PanelPlan:
    by = "cause" if name.startswith("share/") else "staleness"
    return PanelPlan(f"{name} by {by}", (), f"^{re.escape(name)}@.*$", "step", name in _LOG_SCALE)


def build(*, entity: str, project: str) -> Any:  # noqa: ANN401  (the package has no types)
    """The workspace, not saved.

    Raises:
        ConfigError: wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise ConfigError(
            f"a W&B workspace needs the package wandb-workspaces ({error}): "
            "pip install 'asyncrl[dashboard]'"
        ) from error
    sections = [
        workspaces.Section(
            name=section.name,
            is_open=index < _NUM_OPEN,
            panels=[panels.LinePlot(**_arguments(panel)) for panel in section.panels],
        )
        for index, section in enumerate(plan())
    ]
    rollouts = workspaces.Section(
        name="rollouts", panels=[panels.WeavePanelSummaryTable(table_name="rollouts")]
    )
    return workspaces.Workspace(
        entity=entity, project=project, name="asyncrl", sections=[*sections, rollouts]
    )


def _arguments(panel: PanelPlan) -> Mapping[str, Any]:
    chosen = {"metric_regex": panel.pattern} if panel.pattern else {"y": list(panel.metrics)}
    return {"title": panel.title, "x": panel.x, "log_y": panel.log_y or None, **chosen}


def save_workspace(*, entity: str, project: str) -> str:
    """Save the workspace to W&B and return its address.

    Raises:
        ConfigError: wandb-workspaces is not installed, or W&B refuses (no login, no such project).
    """
    from wandb.errors import Error as WandbError

    workspace = build(entity=entity, project=project)
    try:
        saved = workspace.save()
    except (WandbError, ValueError, OSError) as error:
        raise ConfigError(
            f"W&B did not take the workspace for {entity}/{project}: {error}; log in with `wandb "
            "login`, and let a run with telemetry.wandb=online make the project first"
        ) from error
    return str(saved.url)
