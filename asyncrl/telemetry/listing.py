"""`asyncrl metrics`: every metric and alert as one table, in sections of what one asks about."""

from asyncrl.telemetry.alerts import ALERTS
from asyncrl.telemetry.metrics import METRICS

SECTIONS: dict[str, tuple[str, ...]] = {
    "reward": ("reward", "groups", "rollouts", "tokens"),
    "staleness": ("staleness",),
    "mismatch": ("mismatch", "canary", "drift", "correction"),
    "loss": ("loss", "kl", "ratio", "policy", "optimizer"),
    "throughput": ("rate", "learner", "generator"),
    "time": ("time", "share"),
    "queue": ("ledger", "scoring", "prompts"),
    "eval": ("eval",),
}
"""Section -> first parts of metric names; what is in none is listed as "more"."""

_WORDS = {"value": "-", "token": "per trained token", "measured": "per measured token"}


def metrics_table() -> str:
    """Lines of name, unit, reduction and meaning, by section; the alerts below them."""
    section_of = {part: name for name, parts in SECTIONS.items() for part in parts}
    rows: dict[str, list[tuple[str, str, str, str]]] = {name: [] for name in (*SECTIONS, "more")}
    for name, metric in METRICS.items():
        section = section_of.get(name.partition("/")[0], "more")
        reduction = _WORDS.get(metric.reduction, f"per {metric.reduction}")
        rows[section].append((name, metric.unit, reduction, metric.meaning))
    width = [max(len(row[i]) for part in rows.values() for row in part) for i in range(3)]
    lines = []
    for section, part in rows.items():
        if part:
            lines += ["", section]
            lines += ["  " + "  ".join(
                [*(cell.ljust(w) for cell, w in zip(row, width, strict=False)), row[3]]
            ) for row in part]  # fmt: skip
    lines += ["", "alerts"]
    for alert in ALERTS:
        since = f"{alert.num_steps} steps" if alert.num_steps > 1 else "1 step"
        rule = f"{alert.metric} {alert.side} {alert.threshold:g} in {since}"
        lines.append(f"  {alert.name.ljust(width[0])}  {rule}: {alert.advice}")
    return "\n".join(lines[1:]) + "\n"
