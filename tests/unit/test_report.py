"""The report: whole, safe against what models write, patient with half-written files."""

import json
import re

import pytest

from asyncrl.errors import ConfigError
from asyncrl.report.data import collect, read_lines, thin, why
from asyncrl.report.page import embedded, write_report

EVIL = "</script><script>alert(1)</script> <img src=x onerror=alert(2)> \u2028 \ud800"


def step(number, **values):
    base = {
        "step": number, "reward/mean": 0.1 * number, "time/step_s": 1.0, "time/forward_s": 0.5,
        "staleness/tokens@0": 10.0, "staleness/tokens@2": 5.0, "mismatch/k3@2": 0.25, "alerts": [],
    }  # fmt: skip
    return base | values


def rollout(step_number, group, index, **values):
    base = {
        "step": step_number, "group_id": group, "index": index, "ordinal": 0, "generator": "g",
        "prompt": "p", "answer": "a", "text": "t", "score": 1.0, "verdict": "scored", "detail": "",
        "finish_reason": "stop", "num_tokens": 2, "version_spans": [[0, 0, 1], [1, 1, 2]],
        "mean_behaviour_logprob": -0.5,
    }  # fmt: skip
    return base | values


@pytest.fixture
def run_dir(tmp_path):
    """Four steps of two groups of two rollouts; the trace is missing."""
    write(tmp_path / "metrics.jsonl", [step(i) for i in range(4)])
    rollouts = [rollout(i, 10 * i + g, r) for i in range(4) for g in range(2) for r in range(2)]
    write(tmp_path / "rollouts.jsonl", rollouts)
    return tmp_path


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def data_of(page):
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found)


def test_the_page_holds_what_the_records_say(run_dir):
    out = run_dir / "report.html"
    write_report(run_dir, out)
    data = data_of(out.read_text())
    assert data["steps"] == [0, 1, 2, 3]
    assert data["curves"]["reward/mean"] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert data["staleness"] == {"0": 40.0, "2": 20.0}  # four steps of 10 and of 5
    assert data["by_staleness"]["mismatch/k3"] == {"2": 0.25}
    assert len(data["rollouts"]) == data["num_rollouts"] == 16


def test_what_a_model_writes_stays_text(run_dir):
    write(run_dir / "rollouts.jsonl", [rollout(0, 0, 0, text=EVIL, prompt=EVIL, detail=EVIL)])
    out = run_dir / "report.html"
    write_report(run_dir, out)
    page = out.read_text(encoding="utf-8")
    # The page's own two scripts, and no other element that came with the text.
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert data_of(page)["rollouts"][0]["text"] == EVIL.replace("\ud800", "?")
    script = page[page.rindex("<script>") :]
    for door in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert door not in script


def test_nothing_is_fetched_from_anywhere(run_dir):
    out = run_dir / "report.html"
    write_report(run_dir, out)
    page = out.read_text()
    assert re.findall(r"""(?:src|href)=["'](?!#)""", page) == []
    addresses = set(re.findall(r"https?://[^\"'\s<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_a_line_that_is_being_written_is_left_out(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    assert collect(run_dir, max_rollouts=100)["steps"] == [0, 1, 2, 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl:2 is not JSON"):
        read_lines(path)


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no record of a step"):
        write_report(tmp_path, tmp_path / "report.html")


def test_numbers_that_json_does_not_have_are_null():
    values = {"a": float("nan"), "b": [float("inf"), -float("inf"), 1.5]}
    assert json.loads(embedded(values)) == {"a": None, "b": [None, None, 1.5]}


def test_of_many_rollouts_whole_groups_are_kept_evenly():
    rollouts = [rollout(i, i, r) for i in range(100) for r in range(4)]
    kept = thin(rollouts, 40)
    groups = sorted({r["group_id"] for r in kept})
    assert groups == list(range(0, 100, 10))  # 40 / 4 = 10 groups of 100
    assert len(kept) == 40
    assert thin(rollouts, 400) == rollouts


def test_a_step_says_what_it_was_spent_on():
    record = step(37, **{"time/step_s": 9.0, "time/wait_batch_s": 8.0, "bottleneck": "generation"})
    found = why(record, {"generator": {"eval": 0.75, "decode": 0.25}})
    assert found["text"] == "wait_batch 8 s, forward 0.5 s; generators: eval 75%, decode 25%"
    assert (found["step"], found["seconds"], found["limit"]) == (37, 9.0, "generation")


def test_dropped_groups_are_in_the_page_with_their_reasons(run_dir):
    drops = [{"group_id": 9, "reason": EVIL}, {"group_id": 10, "reason": "too old"}]
    write(run_dir / "drops.jsonl", drops)
    out = run_dir / "report.html"
    write_report(run_dir, out)
    found = data_of(out.read_text(encoding="utf-8"))["drops"]
    assert [drop["reason"] for drop in found] == [EVIL.replace("\ud800", "?"), "too old"]
