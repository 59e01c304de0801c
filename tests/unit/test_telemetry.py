"""Metrics, sinks, traces and the run's summary."""

import json
import time
from pathlib import Path

import pytest

from asyncrl.config import PipelineConfig
from asyncrl.telemetry.console import Follower, eval_line, step_line, summary
from asyncrl.telemetry.metrics import resolve
from asyncrl.telemetry.sinks import JsonlSink, WandbSink, set_later_aside
from asyncrl.telemetry.trace import Tracer


def test_sums_are_divided_by_their_declared_count_and_values_are_not() -> None:
    found = resolve(
        {"reward/mean": 6.0, "loss/policy": 5.0, "optimizer/grad_norm": 3.0, "mismatch/k3@2": 0.5},
        {"scored": 4.0, "token": 10.0},
    )
    assert found == {
        "reward/mean": 1.5, "loss/policy": 0.5, "optimizer/grad_norm": 3.0, "mismatch/k3@2": 0.5,
    }  # fmt: skip


def test_a_mean_over_nothing_is_left_out_rather_than_shown_as_zero() -> None:
    # F089.
    assert resolve({"reward/mean": 0.0}, {"scored": 0.0}) == {}


def test_an_undeclared_metric_raises() -> None:
    with pytest.raises(KeyError, match=r"reward/meen"):
        resolve({"reward/meen": 1.0}, {})


def test_jsonl_refuses_nan_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for value in (1.0, 2.0):
        sink = JsonlSink(path)
        sink.write({"a": value})
        sink.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1.0}, {"a": 2.0}]
    with pytest.raises(ValueError, match="JSON"):
        JsonlSink(path).write({"a": float("nan")})


def test_a_follower_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    follower = Follower(path)
    assert list(follower.new()) == []
    path.write_text('{"a": 1}\n{"a":')
    assert list(follower.new()) == [{"a": 1}]
    with path.open("a") as file:
        file.write(" 2}\n")
    assert list(follower.new()) == [{"a": 2}]


def test_a_follower_shows_only_what_is_new_when_a_resumed_run_takes_steps_back(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {s}, "of": "first"}}\n' for s in range(5)))
    follower = Follower(path)
    assert [record["step"] for record in follower.new()] == [0, 1, 2, 3, 4]
    set_later_aside(path, key="step", limit=2)
    assert list(follower.new()) == []
    with path.open("a") as file:
        file.writelines(f'{{"step": {s}, "of": "the second attempt"}}\n' for s in range(2, 7))
    assert [record["step"] for record in follower.new()] == [2, 3, 4, 5, 6]


def test_spans_are_written_as_chrome_trace_events_and_totalled(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "t.jsonl", process="p")
    tracer.add("x", 10.0, 10.5)
    tracer.add("x", 11.0, 11.25)
    tracer.add("y", 10.2, 10.3)
    tracer.close()
    assert tracer.totals()["x"] == 0.75  # 0.5 + 0.25
    events = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [event["name"] for event in events] == ["start", "x", "x", "y", "end"]
    assert events[1] == {
        "name": "x", "ph": "X", "ts": 10_000_000, "dur": 500_000, "pid": "p", "tid": "p",
    }  # fmt: skip


def test_summary_leaves_out_steps_that_trained_no_token_or_got_no_score(tmp_path: Path) -> None:
    common = {"time_s": 6.0, "time/step_s": 6.0}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, record in enumerate(
            (
                {},
                {"staleness/max": 3, "staleness/mean": 1.5, "reward/mean": 0.25},
                {"staleness/max": 1, "staleness/mean": 0.5, "reward/mean": 0.75},
                {},
            )
        ):
            file.write(json.dumps({"step": step} | common | record) + "\n")
    found = summary(tmp_path)
    assert (found["steps"], found["max_staleness"], found["mean_staleness"]) == (4, 3, 1.0)
    assert (found["reward_first"], found["reward_last"]) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("means", "before", "after", "curve"),
    [
        ((0.25, 0.5, 0.75), 0.25, 0.75, [[0, 0.25], [1, 0.5], [2, 0.75]]),
        ((0.25, None, 0.75), 0.25, 0.75, [[0, 0.25], [2, 0.75]]),
        ((None, 0.5, None), None, None, [[1, 0.5]]),  # the end of training is not its middle
        ((None, None, None), None, None, []),
        ((0.25,), 0.25, None, [[0, 0.25]]),  # interrupted before another one
    ],
)
def test_an_evaluation_without_a_score_is_no_score_of_the_summary(
    tmp_path: Path, means, before, after, curve
) -> None:
    with (tmp_path / "evals.jsonl").open("w") as file:
        for version, mean in enumerate(means):
            counts = {"num_samples": 0 if mean is None else 8, "num_unscored": 0}
            file.write(json.dumps({"version": version, "mean_score": mean} | counts) + "\n")
    found = summary(tmp_path)
    assert (found.get("held_out_before"), found.get("held_out_after")) == (before, after)
    assert None not in found.values()
    assert found["held_out_curve"] == curve


def test_the_line_of_an_evaluation_says_how_many_samples_of_how_many_prompts_were_scored() -> None:
    record = {"version": 3, "mean_score": 0.25, "num_samples": 6, "num_unscored": 2, "seconds": 1.0}
    assert eval_line(record) == "held-out score 0.250 at version 3 (6 of 8 samples scored, 1 s)"
    record["num_prompts"] = 2
    expected = "held-out score 0.250 at version 3 (6 of 8 samples of 2 prompts scored, 1 s)"
    assert eval_line(record) == expected
    record |= {"mean_score": None, "num_samples": 0, "num_unscored": 8}
    expected = (
        "held-out score unknown at version 3 (none of 8 samples of 2 prompts was scored, 1 s)"
    )
    assert eval_line(record) == expected


def test_the_summary_says_of_how_many_prompts_the_held_out_samples_are(tmp_path: Path) -> None:
    record = {"version": 0, "mean_score": 0.5, "num_samples": 6, "num_unscored": 2}
    path = tmp_path / "evals.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert "held_out_prompts" not in summary(tmp_path)  # of a release that did not record it
    path.write_text(json.dumps(record | {"num_prompts": 2}) + "\n")
    found = summary(tmp_path)
    assert (found["held_out_samples"], found["held_out_prompts"]) == (6, 2)


def test_summary_of_a_run_that_left_nothing_is_not_an_error(tmp_path: Path) -> None:
    assert summary(tmp_path) == {"steps": 0}


def test_records_that_are_made_again_are_set_aside_and_none_is_lost(tmp_path: Path) -> None:
    # F085.
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {s}}}\n' for s in range(5)) + '{"step": 5, "cut')
    assert set_later_aside(path, key="step", limit=3) == 3  # steps 3, 4 and the cut line
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    aside = path.with_name("metrics.jsonl.set-aside").read_text()
    assert aside == '{"step": 3}\n{"step": 4}\n{"step": 5, "cut'
    assert set_later_aside(path, key="step", limit=3) == 0
    assert set_later_aside(tmp_path / "absent.jsonl", key="step", limit=0) == 0


def test_only_a_newline_ends_a_record_and_a_cut_character_is_no_error(tmp_path: Path) -> None:
    """Completions hold whatever a model samples: U+2028 and U+0085 are line ends to str alone."""
    path = tmp_path / "rollouts.jsonl"
    sink = JsonlSink(path)
    for step in range(3):
        sink.write({"step": step, "text": "a\u2028b\x85c"})
    sink.close()
    whole = path.read_bytes().splitlines(keepends=True)
    with path.open("ab") as file:
        file.write('{"step": 3, "text": "é'.encode()[:-1])  # killed within the two bytes of é
    assert set_later_aside(path, key="step", limit=2) == 2  # step 2 and the cut line
    assert path.read_bytes() == whole[0] + whole[1]


def test_training_time_of_a_resumed_run_is_that_of_all_its_attempts(tmp_path: Path) -> None:
    """time_s begins again with each attempt; 4 steps of 30 s are 2 minutes."""
    keys = {"reward/mean": 0.5, "staleness/max": 1.0, "staleness/mean": 1.0, "time/step_s": 30.0}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, time_s in enumerate((30.0, 60.0, 30.0, 60.0)):
            file.write(json.dumps({"step": step, "time_s": time_s} | keys) + "\n")
    assert summary(tmp_path)["train_minutes"] == 2.0


def test_offline_wandb_keeps_every_row_in_its_own_file(tmp_path: Path) -> None:
    """Rows of the step axis and of the evaluation axis, in whatever order (F084), and the group."""
    sink = WandbSink(
        mode="offline", project="p", name="n", run_id="r1", config={"a": 1}, folder=tmp_path,
        group="my-sweep",
    )  # fmt: skip
    sink.write({"step": 10, "reward/mean": 0.125})
    sink.write({"eval/version": 8, "eval/score": 0.0625})
    sink.write({"step": 11, "reward/mean": 0.5})
    sink.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-r1.wandb")
    expected = {b"0.125", b"0.0625", b"0.5", b"my-sweep"}
    deadline = time.monotonic() + 60  # the client's own process writes the file out
    while missing := {value for value in expected if value not in file.read_bytes()}:
        assert time.monotonic() < deadline, missing
        time.sleep(0.05)
    assert sink.num_dropped == 0


def test_the_line_of_a_step_has_its_number_on_record_and_the_version_that_it_makes() -> None:
    # Step s trains version s into s + 1; the last of 24 steps is step 23.
    record = {"step": 23, "version": 24, "time/step_s": 1.0}
    line = step_line(record, PipelineConfig(num_steps=24))
    assert line.startswith("step  23 -> version  24/24  reward")


def test_the_line_of_a_step_does_not_contradict_the_alerts_that_are_on() -> None:
    record = {
        "step": 2, "version": 3, "time/step_s": 1.0, "share/learner@wait_batch": 0.8,
        "share/learner@forward": 0.2, "share/generator@decode": 1.0, "alerts": [],
    }  # fmt: skip
    line = step_line(record, PipelineConfig())
    assert line.endswith("a larger pipeline.max_staleness or pipeline.depth)")
    line = step_line(record | {"alerts": ["effective_sample"]}, PipelineConfig())
    assert line.endswith("depth, but alerts speak against it: effective_sample)")


def test_a_step_tells_how_many_groups_were_dropped(tmp_path: Path) -> None:
    record = {
        "step": 2, "version": 3, "time/step_s": 1.0, "ledger/admitted": 40.0, "ledger/trained": 24.0,
        "ledger/dropped_stale": 2.0, "ledger/dropped_filtered": 9.0,
    }  # fmt: skip
    assert "  dropped 11 of 40 groups so far" in step_line(record, PipelineConfig())
    none = record | {"ledger/dropped_stale": 0.0, "ledger/dropped_filtered": 0.0}
    assert "dropped" not in step_line(none, PipelineConfig())
    (tmp_path / "metrics.jsonl").write_text(json.dumps(none) + "\n" + json.dumps(record) + "\n")
    assert summary(tmp_path)["dropped_groups"] == 11
