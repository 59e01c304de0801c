"""Writes the page: one file, no network, the data as JSON inside it.

Invariant: nothing of a run becomes markup. The JSON has no "<", so it cannot end its element, and the
script puts texts into the page as text nodes only.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from asyncrl.report.data import collect

MAX_ROLLOUTS = 20_000


def write_report(run_dir: Path, out: Path, *, max_rollouts: int = MAX_ROLLOUTS) -> dict[str, Any]:
    """Write the page about the run in `run_dir`; the data in it.

    Raises:
        ConfigError: no record of a step in this folder.
        OSError: `out` cannot be written.
    """
    data = collect(run_dir, max_rollouts=max_rollouts)
    out.write_text(render(data), encoding="utf-8")
    return data


def render(data: dict[str, Any]) -> str:
    """The page with `data` in it."""
    assets = resources.files("asyncrl.report")
    page = (assets / "page.html").read_text(encoding="utf-8")
    for name, text in (
        ("STYLE", (assets / "page.css").read_text(encoding="utf-8")),
        ("SCRIPT", (assets / "page.js").read_text(encoding="utf-8")),
        ("DATA", embedded(data)),
    ):
        page = page.replace(f"@@{name}@@", text, 1)
    return page


def embedded(data: dict[str, Any]) -> str:
    """JSON that is safe inside a script element: no "<", no line separators of JavaScript."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _finite(value: Any) -> Any:  # noqa: ANN401
    """JSON has no NaN: null."""
    if isinstance(value, float) and value not in (float("inf"), float("-inf")) and value == value:
        return value
    if isinstance(value, float):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, str):  # half a surrogate pair cannot be written
        return value.encode("utf-8", "replace").decode()
    return value
