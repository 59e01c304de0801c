"""One frame of the live view, as rich renderables: a pure function of RunState.

Completions are other people's text, and so is every name in a record: control characters, which could
move the cursor or recolour the terminal, are shown as a dot, and nothing is read as markup. Strings
therefore become cells through `_add`, and other text through `plain`.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.report.files import setting
from asyncrl.report.state import RunState
from asyncrl.telemetry.attribution import record_shares
from asyncrl.telemetry.bottleneck import diagnose
from asyncrl.telemetry.terminal import plain

_BARS = "▁▂▃▄▅▆▇█"
_STYLE = {
    "running": "cyan",
    "done": "green",
    "interrupted": "yellow",
    "failed": "red",
    "killed": "red",
}
_WAITS = ("wait_batch", "wait_credit", "wait_score", "wait_weights")
_WIDEST = 400
"""Characters of a cell."""

_LEDGER = (
    "admitted", "trained", "queued", "in_flight", "dropped_stale", "dropped_filtered", "failed",
)  # fmt: skip


def frame(state: RunState) -> RenderableType:
    """Everything, one part below the other."""
    parts = [
        _head(state),
        _two(_learning(state), _staleness(state)),
        _two(_time(state), _ledger(state)),
        _alerts(state),
        _rollouts(state),
    ]
    return Group(*(part for part in parts if part is not None))


def sparkline(values: Sequence[float], width: int) -> str:
    """Means of `width` slices between the least and the largest value; "" without values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    slices = [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
    low, high = min(slices), max(slices)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in slices)


def _head(state: RunState) -> RenderableType:
    done = max(state.seconds, default=-1) + 1
    total = state.num_steps
    verdict = state.verdict.state
    line = Text.assemble(
        (plain(str(setting(state.config, "name") or "run"), 80), "bold"), "  ",
        (verdict, f"bold {_STYLE.get(verdict, 'white')}"),
        f"  {done} of {total} steps" if total else f"  {done} steps",
    )  # fmt: skip
    if verdict == "running" and total and state.seconds and done < total:
        recent = statistics.median(list(state.seconds.values())[-20:])
        line.append(f"  {recent:.2g} s a step, about {_duration((total - done) * recent)} to go")
    elif verdict != "running":
        line.append(f"  {plain(state.verdict.text, 300)}")
    for text in state.restarts:
        line.append(f"\n{plain(text, _WIDEST)}", style="yellow")
    if total is None or total < 1:
        return line
    bar = Table.grid(expand=True)  # which ends its line; a bar by itself does not
    bar.add_row(ProgressBar(total=total, completed=min(done, total)))
    return Group(line, bar)


def _learning(state: RunState) -> RenderableType:
    table = _grid()
    rewards = list(state.rewards.values())
    if rewards:
        _add(table, "reward", f"{rewards[0]:.3g} → {rewards[-1]:.3g}  {sparkline(rewards, 36)}")
    if state.evals:
        scores = [state.evals[version] for version in sorted(state.evals)]
        text = f"{scores[0]:.3g} → {scores[-1]:.3g}  {sparkline(scores, 36)}"
        _add(table, "held-out", f"{text} at version {max(state.evals)}")
    for name, label in (
        ("loss/policy", "loss"), ("policy/entropy", "entropy"), ("optimizer/grad_norm", "grad norm"),
        ("tokens/completion_mean", "tokens"), ("rate/sampled_tokens_per_s", "sampled/s"),
        ("rate/trained_tokens_per_s", "trained/s"),
    ):  # fmt: skip
        if name in state.last:
            _add(table, label, f"{state.last[name]:.4g}")
    return Panel(table, title="learning", title_align="left")


def _staleness(state: RunState) -> RenderableType:
    table = _grid()
    last, bound = state.last, setting(state.config, "pipeline.max_staleness")
    mean, largest = last.get("staleness/mean"), last.get("staleness/max")
    if mean is not None and largest is not None:
        _add(table, "tokens", f"mean {mean:.2f}, largest {largest:.0f} of k = {bound}")
    counts = _by_age(last, "staleness/tokens")
    total = sum(counts.values())
    mismatch = _by_age(last, "mismatch/k3")
    for age, count in counts.items():
        share = count / total if total else 0.0
        text = f"{'█' * round(20 * share):<20} {share:4.0%}"
        if age in mismatch:
            text += f"  k3 {mismatch[age]:.1e}"
        _add(table, f"{age} old", text)
    return Panel(table, title="staleness of the last step", title_align="left")


def _by_age(record: Mapping[str, float], name: str) -> dict[int, float]:
    """Of one step, by staleness; no such value is negative."""
    found = {}
    for key, value in record.items():
        base, at, age = key.partition("@")
        if base == name and at and age.isdecimal() and len(age) < 9 and value >= 0:
            found[int(age)] = float(value)
    return dict(sorted(found.items()))


def _time(state: RunState) -> RenderableType:
    shares = record_shares(state.last)
    table = _grid()
    for kind in ("learner", "generator"):
        causes = shares.get(kind, {})
        if not causes:
            continue
        waits = sum(causes.get(cause, 0.0) for cause in _WAITS)
        bar = Text("█" * round(20 * (1 - waits)), "green") + Text("░" * round(20 * waits), "red")
        main = sorted(causes.items(), key=lambda item: -item[1])[:3]
        spent = ", ".join(f"{cause} {share:.0%}" for cause, share in main)
        bar.append(plain(f" waits {waits:.0%}; {spent}", _WIDEST))
        _add(table, kind, bar)
    found = diagnose(shares, state.split, alerts=state.last.get("alerts", ()))
    return Panel(
        Group(table, Text(plain(found.text, _WIDEST), "bold")),
        title="who waits",
        title_align="left",
    )


def _ledger(state: RunState) -> RenderableType:
    table = _grid()
    for name in _LEDGER:
        if (value := state.last.get(f"ledger/{name}")) is not None:
            _add(table, name, f"{value:.0f}")
    for drop in state.drops:
        why = f"group {drop.get('group_id')} at version {drop.get('version')}: {drop.get('reason')}"
        _add(table, "dropped", plain(why, 60))
    return Panel(table, title="groups", title_align="left")


def _alerts(state: RunState) -> RenderableType | None:
    on = state.last.get("alerts", [])
    if not on and not state.alerts:
        return None
    lines = [Text(f"step {step}: {plain(text, 400)}", "yellow") for step, text in state.alerts]
    title = "alerts" + (f"; on: {', '.join(on)}" if on else "")
    return Panel(Group(*lines), title=Text(plain(title, 200)), title_align="left")


def _rollouts(state: RunState) -> RenderableType | None:
    if not state.rollouts:
        return None
    table = Table(expand=True, box=None, pad_edge=False)
    for name in ("step", "group", "score", "staleness"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prompt → completion", ratio=1, no_wrap=True)
    for row in state.rollouts:
        score, spans, step = row.get("score"), row.get("version_spans"), row.get("step")
        age = step - spans[0][0] if spans and step is not None else "-"
        text = f"{plain(row.get('prompt', '')[-40:], 40)} → {plain(row.get('text', ''), 160)}"
        _add(
            table, str(row.get("step", "-")), str(row.get("group_id", "-")),
            "-" if score is None else f"{score:.3g}", str(age), Text(text, overflow="ellipsis"),
        )  # fmt: skip
    return Panel(table, title="last rollouts", title_align="left")


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """A row; strings as they are, since rich would read a string of a table as markup."""
    shown = (cell if isinstance(cell, Text) else Text(plain(cell, _WIDEST)) for cell in cells)
    table.add_row(*shown)


def _two(left: RenderableType, right: RenderableType) -> Table:
    table = Table.grid(expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(left, right)
    return table


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
