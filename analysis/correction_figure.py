"""Draws the figure of correction_study.py from its result; needs matplotlib (extra `analysis`).

python analysis/correction_figure.py [--result ...json] [--out ...svg]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

SHOWN = {
    "none": ("#8c8c8c", "-"),
    "behaviour anchor": ("#c44e52", "-"),
    "token TIS, C = 2": ("#1f5fa8", "-"),
    "IcePop [0.5, 5]": ("#6ba4d8", "--"),
    "sequence TIS, C = 2": ("#2f8f4e", "-"),
    "sequence IS, no cap": ("#7fc796", "--"),
}
"""The methods drawn, by colour and dash; the default of the trainer is the dark blue one."""

PANELS = (
    ("bias", "bias of the expected gradient", 2.2),
    ("rmse", "error of one step of 64 sequences", 3.5),
)


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description="figure of correction_study.py")
    folder = Path("analysis")
    parser.add_argument("--result", type=Path, default=folder / "results/correction_study.json")
    parser.add_argument("--out", type=Path, default=folder / "figures/correction_study.svg")
    options = parser.parse_args()
    result = json.loads(options.result.read_text())
    # Reproducible bytes: no random ids, no date.
    plt.rcParams.update({"svg.hashsalt": "asyncrl", "font.size": 9, "axes.spines.top": False})
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    for axis, (quantity, label, top) in zip(axes, PANELS, strict=True):
        draw(axis, result, quantity, label, top)
    figure.supxlabel(
        "staleness in versions; below it, how far the probabilities are off on average"
    )
    axes[0].legend(frameon=False, loc="upper left", fontsize=8)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, metadata={"Date": None})


def draw(axis: Axes, result: dict[str, Any], quantity: str, label: str, top: float) -> None:
    """One quantity of every method against staleness."""
    staleness = result["settings"]["staleness"]
    places = range(len(staleness))
    for name, (colour, dash) in SHOWN.items():
        values = result["methods"][name][quantity]
        width = 2.2 if name == "token TIS, C = 2" else 1.4
        axis.plot(places, values, dash, color=colour, lw=width, marker="o", ms=3, label=name)
    drift = [f"{value - 1:.0%}" for value in result["mismatch"]["exp_abs"]]
    axis.set_xticks(places, [f"{k}\n{share}" for k, share in zip(staleness, drift, strict=True)])
    axis.set_ylabel(f"{label}, relative")
    axis.set_ylim(0, top)
    axis.spines["right"].set_visible(False)
    axis.grid(axis="y", lw=0.4, color="#dddddd")


if __name__ == "__main__":
    main()
