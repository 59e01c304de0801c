"""One HTML file: markup, style, script and data together; nothing is fetched.

Data are other people's text: prompts, and whatever a model sampled. Three nets keep it text:

1. in the file, <, >, &, line separators and control characters of the JSON are escapes, so that no
   string ends its element;
2. the script puts text into the page as text nodes only (tests look for other ways);
3. a content security policy allows this one script by its digest, and no connection to anywhere.
"""

import base64
import hashlib
import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.report.data import BUDGET_BYTES, collect
from asyncrl.telemetry.terminal import plain

_SCRIPTS = ("base.js", "charts.js", "time.js", "rollouts.js", "page.js")
_ESCAPES = {
    ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026",
    0x2028: "\\u2028", 0x2029: "\\u2029",
    **{code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)},
}  # fmt: skip


def write_report(run_dir: Path, out: Path, *, budget_bytes: int = BUDGET_BYTES) -> dict[str, Any]:
    """Write the page about the run in `run_dir`, which may be going on; returns its data.

    Raises:
        ConfigError: the folder holds no run.
        OSError: `out` cannot be written.
    """
    data = collect(run_dir, budget_bytes=budget_bytes)
    if data["run"]["state"] == "empty":
        raise ConfigError(
            f"{run_dir} has neither run.json nor a record of a step (metrics.jsonl): it is not the "
            "folder of a run"
        )
    out.write_bytes(render(data))
    return data


def render(data: dict[str, Any]) -> bytes:
    """The page, UTF-8; `data` is collect()'s."""
    assets = resources.files("asyncrl.report") / "assets"
    script = "\n".join((assets / name).read_text("utf-8") for name in _SCRIPTS)
    style = (assets / "page.css").read_text("utf-8")
    parts = {
        "title": html.escape(f"{plain(data['run']['name'], 200)} - asyncrl"),
        "policy": html.escape(
            f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "script": script,
        "data": embedded(data),
    }
    page = (assets / "page.html").read_text("utf-8")
    # Cut at the marks of the template first: what is filled in may look like a mark.
    pieces = page.split("@@")
    for place in range(1, len(pieces), 2):
        pieces[place] = parts[pieces[place]]
    # Half a surrogate pair, which JSON can name, has no UTF-8.
    return "".join(pieces).encode("utf-8", "replace")


def embedded(data: object) -> str:
    """JSON for a script element: the same value, no character that HTML or a terminal obeys."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


def digest(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
