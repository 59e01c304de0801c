"""Runs that are made slow on purpose, each in one place: the cause that is named is that place."""

import json
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.report.causes import causes_by_step
from asyncrl.telemetry.attribution import (
    kind_shares,
    process_seconds,
    record_shares,
    training_window,
)
from asyncrl.telemetry.bottleneck import diagnose
from asyncrl.telemetry.lives import read_lives
from tests.models import make_tiny_model
from tests.process.runs import finish, records, start_run, write_config

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

SCORER = """
import time

def score(completion):
    time.sleep(0.03)
    return float(len(completion) % 2)
"""

EXPECTED = {"broker", "learner", "generator-0", "generator-0-scorer-0"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 0.8 M parameters."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "larger", layers=4, hidden=128)


def run(folder: Path, model: Path, *overrides: str) -> tuple[Path, str]:
    config = write_config(folder, model)
    code, output = finish(start_run(config, folder / "run", "eval.num_prompts=1", *overrides))
    assert code == 0, output
    return folder / "run", output


def assert_named(run_dir: Path, output: str, limit: str, words: str) -> None:
    """Live, in nearly all steps with a second to look back on; and from the trace of the training."""
    named = Counter(r["bottleneck"] for r in records(run_dir) if "bottleneck" in r)
    assert named.total() >= 3
    assert named[limit] >= 0.7 * named.total(), named
    assert words in output
    lives = read_lives(run_dir)
    found = diagnose(kind_shares(lives, training_window(lives)))
    assert found.limit == limit, found


def assert_every_second_has_a_cause(run_dir: Path) -> None:
    """Also against the files themselves: the first and the last moment that they mention."""
    for shares in filter(None, map(record_shares, records(run_dir))):
        assert set(shares) == {"learner", "generator", "scorer", "broker"}
        for causes in shares.values():
            assert sum(causes.values()) == pytest.approx(1.0, abs=0.005)
            assert min(causes.values()) >= 0.0
    for causes in json.loads((run_dir / "summary.json").read_text())["shares"].values():
        assert sum(causes.values()) == pytest.approx(1.0, abs=0.005)
    found = process_seconds(read_lives(run_dir))
    assert set(found) == EXPECTED
    for process, seconds in found.items():
        text = (run_dir / "trace" / f"{process}.jsonl").read_text()
        events = [json.loads(line) for line in text.splitlines()]
        ends = [event["ts"] + event.get("dur", 0) for event in events]
        whole_s = (max(ends) - min(event["ts"] for event in events)) / 1e6
        assert sum(seconds.values()) == pytest.approx(whole_s, rel=0.005)
        assert whole_s > 1.0


def assert_the_page_has_the_times_of_the_records(run_dir: Path) -> None:
    """Both come from the same spans, but the file rounds them to microseconds."""
    by_step = causes_by_step(read_lives(run_dir))
    assert list(by_step) == [record["step"] for record in records(run_dir)]
    assert [s for s, kinds in by_step.items() if "checkpoint" in kinds["learner"]] == [11, 23]
    for record in records(run_dir):
        causes = by_step[record["step"]]["learner"]
        for cause in ("checkpoint", "forward"):
            expected_s = record[f"time/{cause}_s"]
            assert causes.get(cause, 0.0) == pytest.approx(expected_s, abs=1e-4)
        # Read a line of code apart, between which the process may have to wait for a core.
        assert sum(causes.values()) == pytest.approx(record["time/step_s"], abs=0.25)


def test_a_slow_scorer_is_named(small: Path, tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(SCORER)
    rows = "".join(json.dumps({"prompt": f"say {n}", "answer": "a"}) + "\n" for n in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    run_dir, output = run(
        tmp_path, small, "task.kind=jsonl", f'task.path="{tmp_path}/rows.jsonl"',
        f'task.scorer="{tmp_path}/scorer.py:score"', "pipeline.num_steps=8",
    )  # fmt: skip
    assert_named(run_dir, output, "scoring", "(scoring.num_workers)")
    assert_every_second_has_a_cause(run_dir)
    lives = read_lives(run_dir)
    assert kind_shares(lives, training_window(lives))["scorer"]["score"] > 0.5


def test_a_slow_learner_is_named(larger: Path, tmp_path: Path) -> None:
    """Many short answers, each with its prompt in a micro-batch of its own; none is ever learned."""
    run_dir, output = run(
        tmp_path, larger, "engine.max_completion_tokens=4", "learner.share_prompts=false",
        "learner.micro_batch_tokens=36", "pipeline.group_size=32",
        "engine.max_concurrent_completions=128", "optimizer.learning_rate=1e-7",
        "pipeline.num_steps=40",
    )  # fmt: skip
    assert_named(run_dir, output, "learner", "more learner GPUs")
    assert_every_second_has_a_cause(run_dir)


def test_a_slow_generator_is_named_and_its_run_makes_one_timeline(
    small: Path, tmp_path: Path
) -> None:
    """Long answers."""
    run_dir, output = run(
        tmp_path, small, "engine.max_completion_tokens=200", "pipeline.num_steps=24",
        "checkpoint.every_steps=12",
    )  # fmt: skip
    assert_the_page_has_the_times_of_the_records(run_dir)
    assert_named(run_dir, output, "generation", "generation is the bottleneck")
    assert_every_second_has_a_cause(run_dir)
    with pytest.raises(SystemExit, match="0"):
        main(["trace", str(run_dir), "--out", str(tmp_path / "all.json")])
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == EXPECTED
    timed = [event for event in events if event["ph"] != "M"]
    assert {event["pid"] for event in timed} == set(names)
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    assert all(event["dur"] >= 0 for event in timed if event["ph"] == "X")
    adopted = [e for e in timed if e["name"] == "version" and names[e["pid"]] == "generator-0"]
    assert adopted[-1]["args"]["version"] == 24


def test_a_slow_link_is_named(larger: Path, tmp_path: Path) -> None:
    """Weights in thousands of pieces, each asked for when the last one has come."""
    run_dir, output = run(
        tmp_path, larger, 'weights.transport="tcp"', "weights.chunk_bytes=1024",
        "weights.chunks_in_flight=1", "pipeline.max_staleness=1",
    )  # fmt: skip
    assert_named(run_dir, output, "weights", "the weight path is the bottleneck")
    assert_every_second_has_a_cause(run_dir)
