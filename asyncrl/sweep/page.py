"""sweep.html: verdict, tables and figures in one file that needs no other and no network."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.sweep.result import Result
from asyncrl.sweep.verdict import ENDPOINTS

_CAPTIONS = {
    "endpoints": "What is judged, by k: means over seeds, bars are 95 % percentile bootstrap intervals.",
    "samples": "Held-out score against trained samples; bands as above.",
    "seconds": "The same against wall clock, without resumed runs. k = 0 waits for every batch.",
    "staleness": "How old the trained tokens really were; the dotted line is the bound k.",
    "mismatch": "How far the learner's policy is from the one that sampled.",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: right; vertical-align: top }
.scroll { overflow-x: auto } code { overflow-wrap: anywhere }
th:first-child, td:first-child { text-align: left }
.worse { color: #a3282c } .better { color: #2f7d46 } .open { color: #555 }
.warning { background: #fff3d6; padding: .5rem .8rem }
img { max-width: 100% } figcaption, small { color: #666 } figure { margin: 1.5rem 0 }
"""


def make_page(result: Result, figures: Mapping[str, Path]) -> str:
    """The page; without figures it says how to get them."""
    name = html.escape(result["name"])
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{name}</title><style>{_STYLE}</style><h1>Staleness sweep: {name}</h1>",
        *_warnings(result),
        "<h2>Verdict</h2>",
        *(f"<p>{html.escape(entry['sentence'])}</p>" for entry in result["verdict"]),
        _comparisons(result["verdict"]),
        "<p><small>Differences of runs with the same seed, at equal trained samples; 95 % Student "
        "intervals, looked at from the largest k down until one holds 0. Not distinguishable is "
        "not equal: an effect smaller than the interval may be there.</small></p>",
        "<h2>By k</h2>",
        _cells(result["cells"]),
        "<h2>Figures</h2>",
        *(_figure(key, path) for key, path in figures.items()),
    ]
    if not figures:
        parts.append("<p>None; they need matplotlib: pip install 'asyncrl[analysis]'.</p>")
    parts += ["<h2>Runs</h2>", _rows(result["rows"]), "<h2>Made with</h2>", _made_with(result)]
    return "\n".join(parts) + "\n"


def _warnings(result: Result) -> Iterable[str]:
    if result["missing"]:
        yield _warning(
            f"{len(result['missing'])} of {result['num_planned']} runs are missing: "
            + ", ".join(result["missing"][:12])
        )
    for name, cause in result["failed"].items():
        yield _warning(f"{name} failed: {cause}")
    for cell in result["cells"]:
        if cell["num_done"] and not cell["num_timed"]:
            yield _warning(
                f"{cell['variant']}, k = {cell['k']}: every run was resumed, so that its seconds hold "
                "more than one start of the engines."
            )
    if len({host["commit"] for host in result["run_hosts"]}) > 1:
        yield _warning("The runs were made with more than one commit.")


def _warning(text: str) -> str:
    return f"<p class=warning>{html.escape(text)}</p>"


def _comparisons(verdicts: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for entry in verdicts:
        for found in entry["comparisons"]:
            interval = found["interval"]
            numbers = ["-", "-", "-"]
            if interval:
                numbers = [
                    f"{interval['mean']:+.3f}",
                    f"{interval['low']:+.3f}",
                    f"{interval['high']:+.3f}",
                ]
            status = f"<span class={found['status']}>{found['status']}</span>"
            note = html.escape(found["note"])
            lines.append(
                [html.escape(entry["variant"]), ENDPOINTS[entry["endpoint"]], found["k"], *numbers,
                 f"{status} {note}"]
            )  # fmt: skip
    head = ("variant", "endpoint", "k", "difference", "from", "to", "")
    return _table(head, lines)


def _cells(cells: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "variant", "k", "runs", "score at the end", "mean score over training",
        "mean score in the first T s", "T", "staleness", "ESS", "ESS of pi/mu", "k3",
    )  # fmt: skip
    lines = []
    for cell in cells:
        failed = f" (+{cell['num_failed']} failed)" if cell["num_failed"] else ""
        horizon_s = cell["horizon_s"]
        lines.append(
            [
                html.escape(cell["variant"]),
                cell["k"],
                f"{cell['num_done']}{failed}",
                *(_mean(cell[name]) for name in ("final", "area_samples", "area_seconds")),
                f"{horizon_s:.1f}" if horizon_s is not None else "-",
                *(_mean(cell[name]) for name in ("staleness_mean", "ess", "ratio_ess", "k3")),
            ]
        )
    return _table(head, lines)


def _mean(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{found['mean']:.3f} <small>[{found['low']:.3f}, {found['high']:.3f}]</small>"


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        if row["outcome"] == "done":
            age = row["staleness"]["mean"]
            unscored = row.get("num_unscored")
            final = f"{row['final']:.3f}" + (f" ({unscored} unscored)" if unscored else "")
            found = [final, f"{row['area_samples']:.3f}", str(age)]
        else:
            found = ["failed", html.escape(row["cause"]), ""]
        lines.append([html.escape(row["name"]), *found, row["run_seconds"], row["attempts"]])
    head = (
        "run",
        "score at the end",
        "mean score",
        "staleness",
        "seconds of last attempt",
        "attempts",
    )
    return _table(head, lines)


def _made_with(result: Result) -> str:
    lines = []
    for host in result["run_hosts"]:
        hardware = host["hardware"] or {}
        versions = ", ".join(f"{k} {v}" for k, v in (host["versions"] or {}).items())
        commit = f"{host['commit']}{' (modified)' if host['dirty'] else ''}"
        lines.append(
            [commit, hardware.get("processor"), hardware.get("cores"),
             ", ".join(hardware.get("gpus") or ()) or "-", versions]
        )  # fmt: skip
    table = _table(
        ("commit", "processor", "cores of the run's process", "GPUs", "versions"),
        [[html.escape(str(part)) for part in line] for line in lines],
    )
    return f"<p><code>{html.escape(result['command'])}</code></p>{table}"


def _figure(name: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    caption = html.escape(_CAPTIONS[name])
    return (
        f'<figure><img alt="{name}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Cells are HTML; numbers are themselves."""
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{part}</td>" for part in line) + "</tr>" for line in lines
    )
    return f"<div class=scroll><table><tr>{top}</tr>{body}</table></div>"
