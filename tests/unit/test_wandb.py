"""What an offline W&B run holds, read back from the client's own file."""

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from asyncrl.algo.diagnostics import BIN_VALUES, NUM_BINS
from asyncrl.learner.views import MAX_BARS, MAX_ROWS, histograms, rollout_table
from asyncrl.telemetry.sinks import WandbSink
from tests.unit.run_folders import rollout_record
from tests.unit.wandb_file import config, read_records, rows


def sink(folder):
    return WandbSink(
        mode="offline", project="p", name="n", run_id="r1", config={"k": 2, "deep": {"er": "x"}},
        folder=folder, group="together",
    )  # fmt: skip


def attempts(folder):
    return [read_records(path) for path in sorted(folder.glob("wandb/offline-run-*/run-r1.wandb"))]


def close(one, folder):
    """Wait until the client's process has written everything and ended by itself."""
    one.close()
    assert one.num_dropped == 0
    deadline = time.monotonic() + 60  # the client's own process writes the file out
    while any(is_open(records) for records in attempts(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_open(records):
    return not any(record.WhichOneof("record_type") == "exit" for record in records)


@pytest.fixture(scope="module")
def two_attempts(tmp_path_factory):
    """Steps 0..2 with an evaluation, then a resumed attempt that makes step 2 again."""
    folder = tmp_path_factory.mktemp("run")
    table = rollout_table([rollout_record(0, 5, index, text=f"é<{index}>") for index in range(3)])
    first = sink(folder)
    first.write({"eval/version": 0, "eval/score": 0.125})
    first.write(
        {"step": 0, "reward/mean": 0.25, "bottleneck": "learner", "alerts": ["x"]},
        histograms={"histogram/staleness": ([3.0, 1.0], [-0.5, 0.5, 1.5])},
        tables={"rollouts": table},
    )
    first.write({"step": 1, "reward/mean": 0.5}, alerts=[("mismatch", "mismatch: too far")])
    first.write({"step": 2, "reward/mean": 0.75})
    close(first, folder)
    second = sink(folder)
    second.write({"step": 2, "reward/mean": 0.625})
    second.write({"step": 3, "reward/mean": 1.0})
    second.write({"eval/version": 4, "eval/score": 0.875})
    close(second, folder)
    return folder


def test_each_attempt_has_the_one_run_id_name_and_group(two_attempts):
    found = [
        (r.run.run_id, r.run.display_name, r.run.run_group, r.run.project)
        for records in attempts(two_attempts)
        for r in records
        if r.WhichOneof("record_type") == "run"
    ]
    assert found == [("r1", "n", "together", "p")] * 2


def test_the_configuration_is_there_whole(two_attempts):
    for records in attempts(two_attempts):
        found = config(records)
        assert (found["k"], found["deep"]) == (2, {"er": "x"})


def test_every_step_is_a_row_on_the_step_axis_and_every_evaluation_on_its_own(two_attempts):
    first, second = (rows(records) for records in attempts(two_attempts))
    steps = [(r["step"], r["reward/mean"]) for r in [*first, *second] if "reward/mean" in r]
    assert steps == [(0, 0.25), (1, 0.5), (2, 0.75), (2, 0.625), (3, 1.0)]
    evals = [(r["eval/version"], r["eval/score"]) for r in [*first, *second] if "eval/score" in r]
    assert evals == [(0, 0.125), (4, 0.875)]
    axes = {
        m.metric.name or m.metric.glob_name: m.metric.step_metric
        for m in attempts(two_attempts)[0]
        if m.WhichOneof("record_type") == "metric"
    }
    assert axes == {"step": "", "*": "step", "eval/*": "eval/version"}


def test_the_rows_of_a_resumed_attempt_count_on(two_attempts):
    numbers = [row["_step"] for records in attempts(two_attempts) for row in rows(records)]
    assert numbers == list(range(7))


def test_a_table_of_rollouts_a_histogram_and_an_alert_are_there(two_attempts):
    records = attempts(two_attempts)[0]
    [row] = [row for row in rows(records) if row.get("step") == 0 and "reward/mean" in row]
    assert row["bottleneck"] == "learner"
    assert "alerts" not in row  # a list has no curve
    assert row["histogram/staleness/values"] == [3, 1]
    assert row["histogram/staleness/bins"] == [-0.5, 0.5, 1.5]
    assert row["rollouts/nrows"] == 3
    [path] = two_attempts.glob(f"wandb/offline-run-*/files/{row['rollouts/path']}")
    table = json.loads(path.read_text())
    assert table["columns"][:5] == ["step", "group_id", "index", "prompt", "text"]
    assert [line[4] for line in table["data"]] == ["é<0>", "é<1>", "é<2>"]
    alerts = [r.alert for r in records if r.WhichOneof("record_type") == "alert"]
    assert [(a.title, a.text, a.level) for a in alerts] == [
        ("mismatch", "mismatch: too far", "WARN")
    ]


@given(
    arrays(np.float64, (3, NUM_BINS), elements=st.integers(0, 3).map(float), fill=st.just(0.0)),
)
def test_a_histogram_keeps_every_token_in_a_bar_that_holds_its_value(bins):
    found = histograms({}, bins)
    assert {int(name.split("@")[1]) for name in found} == set(np.flatnonzero(bins.sum(1)))
    for name, (counts, edges) in found.items():
        row = bins[int(name.split("@")[1])]
        assert len(counts) == len(edges) - 1 <= MAX_BARS
        assert edges == sorted(set(edges))
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
            last = high == edges[-1]  # this bar is closed, as W&B's are
            inside = [low <= y < high or (last and y == high) for y in BIN_VALUES.tolist()]
            assert row[inside].sum() == count
        assert sum(counts) == row.sum()


def test_staleness_is_a_histogram_around_whole_numbers():
    record = {"staleness/tokens@0": 10.0, "staleness/tokens@2": 5.0, "staleness/mean": 0.7}
    assert histograms(record, None) == {
        "histogram/staleness": ([10.0, 0.0, 5.0], [-0.5, 0.5, 1.5, 2.5])
    }
    assert histograms({}, None) == {}


def test_a_table_is_short_and_says_how_old_its_rollouts_were():
    lines = [rollout_record(5, 1, index) for index in range(MAX_ROWS + 5)]
    columns, *found = rollout_table(lines)
    assert len(found) == MAX_ROWS
    assert dict(zip(columns, found[0], strict=True)) == {
        "step": 5, "group_id": 1, "index": 0, "prompt": "prompt 1", "text": "completion 0",
        "answer": "42", "score": 0.0, "advantage": -1.0, "fate": "trained", "num_tokens": 2,
        "staleness": 2,
    }  # fmt: skip
    assert not any(isinstance(v, float) and math.isnan(v) for row in found for v in row)
