"""Metrics, sinks, traces and the run's summary."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry.console import Follower, summary
from asyncrl.telemetry.metrics import resolve
from asyncrl.telemetry.overlap import busy_intervals, merge, overlap_s
from asyncrl.telemetry.sinks import JsonlSink
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


def test_spans_are_written_as_chrome_trace_events_and_totalled(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "t.jsonl", process="p")
    tracer.add("x", 10.0, 10.5)
    tracer.add("x", 11.0, 11.25)
    tracer.add("y", 10.2, 10.3)
    tracer.close()
    assert tracer.totals()["x"] == 0.75  # 0.5 + 0.25
    events = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert events[0] == {
        "name": "x", "ph": "X", "ts": 10_000_000, "dur": 500_000, "pid": "p", "tid": "p",
    }  # fmt: skip
    assert busy_intervals(tmp_path / "t.jsonl", ["x"]) == [(10.0, 10.5), (11.0, 11.25)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=12),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=12),
)
def test_overlap_equals_a_count_of_the_seconds_in_both(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    """Intervals on whole seconds, so that counting seconds is exact."""

    def covered(spans: list[tuple[int, int]]) -> set[int]:
        return {second for start, length in spans for second in range(start, start + length)}

    def union(spans: list[tuple[int, int]]) -> list[tuple[float, float]]:
        return merge((float(start), float(start + length)) for start, length in spans)

    assert overlap_s(union(left), union(right)) == len(covered(left) & covered(right))


def test_summary_leaves_out_steps_that_trained_no_token_or_got_no_score(tmp_path: Path) -> None:
    common = {"time_s": 6.0, "time/step_s": 6.0}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for record in (
            {},
            {"staleness/max": 3, "staleness/mean": 1.5, "reward/mean": 0.25},
            {"staleness/max": 1, "staleness/mean": 0.5, "reward/mean": 0.75},
            {},
        ):
            file.write(json.dumps(common | record) + "\n")
    found = summary(tmp_path)
    assert (found["steps"], found["max_staleness"], found["mean_staleness"]) == (4, 3, 1.0)
    assert (found["reward_first"], found["reward_last"]) == (0.25, 0.75)


def test_summary_of_a_run_that_left_nothing_is_not_an_error(tmp_path: Path) -> None:
    assert summary(tmp_path) == {"steps": 0}
