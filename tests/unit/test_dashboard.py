"""The W&B workspace: every declared metric has a panel, and no panel names another."""

import importlib.util
import json
import re
import sys

import pytest

from asyncrl.errors import ConfigError
from asyncrl.report.dashboard import build, plan
from asyncrl.telemetry.metrics import METRICS

INSTALLED = importlib.util.find_spec("wandb_workspaces") is not None


def panels():
    return [panel for section in plan() for panel in section.panels]


def test_every_metric_is_drawn_once_by_its_own_name_or_by_its_causes():
    named = [name for panel in panels() for name in panel.metrics]
    assert sorted(named) == sorted(name for name in METRICS if not name.startswith("share/"))
    for kind in ("learner", "generator", "scorer", "broker"):
        [panel] = [p for p in panels() if re.search(p.pattern or "$.", f"share/{kind}@decode")]
        assert panel.title == f"share/{kind} by cause"


def test_a_panel_by_staleness_takes_the_curves_of_its_metric_and_no_other():
    [panel] = [p for p in panels() if p.title == "mismatch/k3 by staleness"]
    names = [
        "mismatch/k3@0",
        "mismatch/k3@12",
        "mismatch/k3",
        "drift/mismatch/k3@0",
        "mismatch/k1@0",
    ]
    assert [n for n in names if re.search(panel.pattern, n)] == names[:2]
    assert panel.metrics == ()


def test_evaluations_have_an_axis_of_their_own():
    for panel in panels():
        is_eval = any(name.startswith("eval/") for name in panel.metrics)
        assert panel.x == ("eval/version" if is_eval else "step")


@pytest.mark.skipif(not INSTALLED, reason="wandb-workspaces is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own models
def test_the_package_takes_the_plan_as_it_is():
    view = json.loads(build(entity="someone", project="asyncrl")._to_model().model_dump_json())
    sections = view["spec"]["section"]["panel_bank_config"]["sections"]
    assert [s["name"] for s in sections if s["name"] in {p.name for p in plan()}] == [
        p.name for p in plan()
    ]
    drawn = {
        metric
        for section in sections
        for panel in section["panels"]
        for metric in panel["config"].get("metrics") or ()
    }
    assert drawn == {name for panel in panels() for name in panel.metrics}
    patterns = {
        panel["config"]["metric_regex"]
        for section in sections
        for panel in section["panels"]
        if panel["config"].get("metric_regex")
    }
    assert patterns == {panel.pattern for panel in panels() if panel.pattern}


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[dashboard\]'"):
        build(entity="someone", project="asyncrl")
