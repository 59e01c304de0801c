"""Numbers and boxes of the page as its script builds them from a run whose numbers are chosen here."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.report.page import write_report
from tests.unit.run_folders import make_run, step_record, write_lines
from tests.unit.test_jsonlines import START

NODE = shutil.which("node")
DOM = Path(__file__).with_name("page_dom.js")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")

Element = dict[str, Any]


def built(run_dir: Path) -> list[Element]:
    """The elements `top` and `main` of the run's page."""
    write_report(run_dir, run_dir / "page.html")
    done = subprocess.run(
        [str(NODE), DOM, run_dir / "page.html"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    parts: list[Element] = json.loads(done.stdout)
    return parts


def walk(node: Element, above: tuple[str, ...] = ()) -> Iterator[tuple[Element, tuple[str, ...]]]:
    """Every element and text below, with the classes above it."""
    yield node, above
    for child in node.get("children", ()):
        yield from walk(child, (*above, *node["class"].split()))


def texts(parts: list[Element]) -> list[str]:
    return [node["text"] for part in parts for node, _ in walk(part) if "text" in node]


def test_tokens_a_second_are_all_tokens_over_all_seconds(tmp_path):
    run_dir = make_run(tmp_path / "run")
    seconds, tokens = [4.0, 0.25, 0.5, 0.25], [400.0, 400.0, 300.0, 250.0]
    records = [
        step_record(
            i, **{"time/step_s": s, "tokens/trained": n, "rate/trained_tokens_per_s": n / s}
        )
        for i, (s, n) in enumerate(zip(seconds, tokens, strict=True))
    ]
    records += [
        step_record(4, **{"time/step_s": 9.0}),  # says nothing of tokens
        step_record(5, **{"tokens/trained": 999.0, "time/step_s": 0.0}),
    ]
    write_lines(run_dir / "metrics.jsonl", records)
    found = texts(built(run_dir))
    # 1350 tokens in 5 s; the mean of the steps' own rates is (100 + 1600 + 600 + 1000) / 4 = 825.
    assert found[found.index("trained tokens a second, over all steps") - 1] == "270"


def test_the_bar_of_the_usual_step_is_of_the_median_that_the_text_names(tmp_path):
    run_dir = make_run(tmp_path / "run")
    seconds = [20.0, 0.08, 0.08, 0.4, 0.08, 0.08]
    write_lines(
        run_dir / "metrics.jsonl",
        [step_record(i, **{"time/step_s": s}) for i, s in enumerate(seconds)],
    )
    # Without step 0, the slowest, which the page opens with: 0.08 in four of five steps.
    parts = built(run_dir)
    found = texts(parts)
    (why,) = [text for text in found if "times the usual" in text]
    assert why.startswith("20.0 s, 250.0 times the usual 80 ms.")
    assert found[found.index("usual (\u00b1 10 steps)") + 1] == "80 ms"
    tips = [node["tip"] for part in parts for node, above in walk(part) if "bar" in above]
    # Half of a step is waiting, half the forward pass: 40 ms each in the median, 10 s each in step 0.
    assert len([tip for tip in tips if tip.endswith("50 %, 40 ms")]) == 2
    assert len([tip for tip in tips if tip.endswith("50 %, 10.0 s")]) == 2


def test_every_table_scrolls_in_its_card_where_it_is_wider_than_the_screen(tmp_path):
    run_dir = make_run(tmp_path / "run")
    write_lines(run_dir / "metrics.jsonl", [step_record(0, new_alerts=["a: b"], alerts=["a"])])
    drop = {"group_id": 1, "version": 0, "reason": "zero_signal", "scores": [1.0, 1.0]}
    write_lines(run_dir / "drops.jsonl", [drop])
    parts = built(run_dir)
    tables = [above for part in parts for node, above in walk(part) if node.get("tag") == "table"]
    # Reasons, drops one by one, alerts, evaluations, rollouts, provenance.
    assert len(tables) == 6
    assert all("scroll" in above for above in tables)
    assert ".scroll { overflow-x: auto; }" in (run_dir / "page.html").read_text()


def test_the_head_names_who_was_started_again(tmp_path):
    run_dir = make_run(tmp_path / "run")
    ends = [("generator-0", "killed by SIGKILL"), ("generator-1", "DeviceError: gone")]
    records = [{"process": name, "cause": why, "time": "noon"} for name, why in ends]
    write_lines(run_dir / "restarts.jsonl", records)
    top, _ = built(run_dir)
    found = [text for text in texts([top]) if "started again" in text]
    assert found == [f"{name}: {why}; started again at noon" for name, why in ends]


def test_what_limits_a_run_is_said_once_a_step_was_trained(tmp_path):
    run_dir = make_run(tmp_path / "run")
    for kind, cause in (("learner", "evaluate"), ("generator", "eval")):
        start = START | {"pid": kind, "args": START["args"] | {"kind": kind}}
        span = {"name": f"{kind}/{cause}", "ph": "X", "ts": 0, "dur": 9_000_000, "pid": kind}
        write_lines(run_dir / f"trace/{kind}.jsonl", [start, span])
    head = texts(built(run_dir))
    assert "What limits it: " in head
    sentence = head[head.index("What limits it: ") + 1]
    assert head.count(sentence) == 2  # in the head, and where the time went
    for lines in ([], None):  # of steps
        path = run_dir / "metrics.jsonl"
        path.unlink() if lines is None else write_lines(path, lines)
        found = texts(built(run_dir))
        assert "What limits it: " not in found
        assert sentence not in found
        assert "No step is on record yet: what limits the run is not known." in found
