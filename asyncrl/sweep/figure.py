"""Figures of a sweep, from its result; needs matplotlib (extra `analysis`).

| name      | x                | y                                                                 |
|-----------|------------------|-------------------------------------------------------------------|
| endpoints | k                | both judged scores of each variant, with percentile intervals      |
| samples   | trained samples  | mean held-out score of each k, one panel a variant                |
| seconds   | seconds          | the same against the median wall clock of runs not resumed         |
| staleness | k                | realized mean staleness, and the share of tokens of each staleness |
| mismatch  | k                | KL (k3) between learner and sampler, effective shares             |

A k whose runs all failed has no point; the verdict and the table name it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.extras import check_matplotlib
from asyncrl.sweep.result import Result
from asyncrl.sweep.verdict import ENDPOINTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#1f5fa8", "#c44e52", "#2f8f4e", "#8064a2", "#b8860b", "#6b6b6b")
Cells = Sequence[dict[str, Any]]


def draw_all(result: Result, folder: Path) -> dict[str, Path]:
    """One PNG for each figure in `folder`; their paths by name.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    by_variant: dict[str, list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        if cell["num_done"]:
            by_variant.setdefault(cell["variant"], []).append(cell)
    paths = {}
    for name, draw in _FIGURES.items() if by_variant else ():
        figure = draw(by_variant)
        path = folder / f"{name}.png"
        FigureCanvasAgg(figure).print_png(str(path))
        paths[name] = path
    return paths


def _panels(titles: Sequence[str], *, share_y: bool = True) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(titles) + 0.6, 3.4), layout="constrained", dpi=130)
    axes = list(figure.subplots(1, len(titles), sharey=share_y, squeeze=False)[0])
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def _against_k(axis: "Axes", by_variant: dict[str, list[dict[str, Any]]], name: str) -> None:
    """A mean of every cell, variants side by side at each k."""
    ks = sorted({cell["k"] for cells in by_variant.values() for cell in cells})
    for index, (variant, cells) in enumerate(by_variant.items()):
        shown = [cell for cell in cells if cell[name] is not None]
        shift = 0.08 * (index - (len(by_variant) - 1) / 2)
        means = [cell[name]["mean"] for cell in shown]
        axis.errorbar(
            [ks.index(cell["k"]) + shift for cell in shown],
            means,
            yerr=[
                [m - cell[name]["low"] for m, cell in zip(means, shown, strict=True)],
                [cell[name]["high"] - m for m, cell in zip(means, shown, strict=True)],
            ],
            fmt="o-", ms=4, lw=1.2, capsize=2, color=_COLOURS[index % len(_COLOURS)], label=variant,
        )  # fmt: skip
    axis.set_xticks(range(len(ks)), [str(k) for k in ks])
    axis.set_xlabel("k = pipeline.max_staleness", fontsize=8)


def _endpoints(by_variant: dict[str, list[dict[str, Any]]]) -> "Figure":
    figure, axes = _panels(list(ENDPOINTS.values()))
    for axis, name in zip(axes, ENDPOINTS, strict=True):
        _against_k(axis, by_variant, name)
    axes[0].set_ylim(bottom=0.0)
    axes[0].legend(frameon=False, fontsize=7)
    return figure


def _curves(place: str, label: str) -> Callable[[dict[str, list[dict[str, Any]]]], "Figure"]:
    def draw(by_variant: dict[str, list[dict[str, Any]]]) -> "Figure":
        figure, axes = _panels(list(by_variant))
        for axis, cells in zip(axes, by_variant.values(), strict=True):
            for index, cell in enumerate(cells):
                shade = _shade(index, len(cells))
                places = [point[place] for point in cell["curve"]]
                means = [point["mean"] for point in cell["curve"]]
                axis.plot(places, means, color=shade, lw=1.3, label=curve_label(cell, place))
                axis.fill_between(
                    places,
                    [point["low"] for point in cell["curve"]],
                    [point["high"] for point in cell["curve"]],
                    color=shade, alpha=0.12, lw=0,
                )  # fmt: skip
            axis.set_xlabel(label, fontsize=8)
        axes[0].set_ylabel("held-out score", fontsize=8)
        axes[-1].legend(frameon=False, fontsize=7)
        return figure

    return draw


def curve_label(cell: dict[str, Any], place: str) -> str:
    """Of a k's curve; says so where its seconds are of resumed runs, for want of others."""
    resumed = place == "seconds" and not cell["num_timed"]
    return f"k = {cell['k']}" + (", resumed" if resumed else "")


def _shade(index: int, count: int) -> tuple[float, float, float]:
    """From dark blue (fresh) to orange (stale)."""
    t = index / max(1, count - 1)
    return 0.05 + 0.9 * t, 0.25 + 0.3 * t, 0.55 - 0.5 * t


def staleness(by_variant: dict[str, list[dict[str, Any]]]) -> "Figure":
    """Left, the realized mean by k on a linear scale, with the bound; right, the tokens of each age."""
    first = next(iter(by_variant))
    figure, axes = _panels(
        ["realized staleness, mean", f"tokens by staleness, {first}"], share_y=False
    )
    _against_k(axes[0], by_variant, "staleness_mean")
    ks = sorted({cell["k"] for cells in by_variant.values() for cell in cells})
    axes[0].plot(range(len(ks)), ks, color="#999999", lw=0.8, ls=":", label="k")
    axes[0].set_ylim(bottom=0.0)
    axes[0].legend(frameon=False, fontsize=7)
    for index, cell in enumerate(by_variant[first]):
        total = sum(cell["staleness_tokens"].values())
        ages = [int(age) for age in cell["staleness_tokens"]]
        shares = [count / total for count in cell["staleness_tokens"].values()]
        shade = _shade(index, len(by_variant[first]))
        axes[1].plot(ages, shares, "o-", ms=3, lw=1, color=shade, label=f"k = {cell['k']}")
    axes[1].set_xlabel("staleness of a trained token in versions", fontsize=8)
    axes[1].set_ylabel("share of the tokens", fontsize=8)
    axes[1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _mismatch(by_variant: dict[str, list[dict[str, Any]]]) -> "Figure":
    titles = ["KL to the sampler (k3), nats", "ESS of pi_prox / mu", "ESS under the loss's weights"]
    figure, axes = _panels(titles, share_y=False)
    for axis, name in zip(axes, ("k3", "ratio_ess", "ess"), strict=True):
        _against_k(axis, by_variant, name)
    axes[0].legend(frameon=False, fontsize=7)
    return figure


_FIGURES: dict[str, Callable[[dict[str, list[dict[str, Any]]]], "Figure"]] = {
    "endpoints": _endpoints,
    "samples": _curves("samples", "trained samples"),
    "seconds": _curves("seconds", "seconds since the first step"),
    "staleness": staleness,
    "mismatch": _mismatch,
}
