"""Folders of a sweep's runs, as finished runs leave them."""

import json
from pathlib import Path
from typing import Any

from asyncrl.config import to_toml
from asyncrl.sweep.plan import PlannedRun, plan_runs
from asyncrl.sweep.settings import SweepSettings, read_sweep

BASE = """
[model]
path = "some/model"
[task]
kind = "repeat_letter"
[pipeline]
groups_per_step = 2
group_size = 3
num_steps = 4
[eval]
every_steps = 2
"""


def plan(folder: Path, *overrides: str) -> tuple[SweepSettings, list[PlannedRun]]:
    (folder / "base.toml").write_text(BASE)
    (folder / "sweep.toml").write_text(
        f'base = "base.toml"\nout = "{folder}/out"\n'
        "[grid]\nseed = [0, 1, 2]\npipeline.max_staleness = [0, 4]\n"
    )
    settings = read_sweep(folder / "sweep.toml", overrides)
    return settings, plan_runs(settings)


def record(run: PlannedRun, *, scores: tuple[float, ...] = (0.0, 0.5, 1.0), num: int = 4) -> None:
    """The files of a run of four steps with evaluations at versions 0, 2, 4."""
    run.run_dir.mkdir(parents=True)
    steps = [
        {"step": s, "version": s + 1, "time/step_s": 10.0 + s, "mismatch/k3": 0.1 * s,
         "correction/ess": 1.0, "staleness/tokens@0": 6.0, "staleness/tokens@2": 2.0 * s}
        for s in range(num)
    ]  # fmt: skip
    evals = [
        {"version": 2 * i, "mean_score": score, "num_samples": 8, "num_unscored": 0}
        for i, score in enumerate(scores)
    ]
    for name, entries in (("metrics", steps), ("evals", evals[::-1])):
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (run.run_dir / f"{name}.jsonl").write_text(text)
    (run.run_dir / "config.toml").write_text(to_toml(run.config))
    (run.run_dir / "run.json").write_text(json.dumps({"commit": "c", "dirty": False}))


def write_evals(run: PlannedRun, *evals: tuple[int, float | None, int, int]) -> None:
    """Of each evaluation its version, mean score, scored and unscored samples."""
    names = ("version", "mean_score", "num_samples", "num_unscored")
    lines = [json.dumps(dict(zip(names, values, strict=True))) + "\n" for values in evals]
    (run.run_dir / "evals.jsonl").write_text("".join(lines))


def cell_row(k: int, curve: list[dict[str, float]]) -> dict[str, Any]:
    """A finished run's row as `make_cells` reads it."""
    return {
        "variant": "v", "k": k, "seed": 0, "outcome": "done", "attempts": 1, "curve": curve,
        "trained_samples": 4, "final": 1.0, "area_samples": 0.5, "ess": None, "ratio_ess": None,
        "k3": None, "staleness": {"mean": float(k), "max": k, "tokens": {"0": 1}},
    }  # fmt: skip
