"""`asyncrl trace` and `asyncrl metrics`: one timeline of all processes, one table of all metrics."""

import gzip
import json

import pytest

from asyncrl.cli import main
from asyncrl.telemetry.alerts import ALERTS
from asyncrl.telemetry.metrics import METRICS
from asyncrl.telemetry.trace import Tracer


def write_run(folder):
    """A learner of two spans, one within the other, and two generators with the same span."""
    learner = Tracer(folder / "trace/learner.jsonl", process="learner")
    with learner.span("learner/record"), learner.span("learner/build"):
        learner.mark("version", version=1)
        learner.count("groups", queued=2, in_flight=3)
    for process in ("generator-0", "generator-1"):
        generator = Tracer(folder / f"trace/{process}.jsonl", process=process, kind="generator")
        with generator.span("generator/decode"):
            pass
        generator.close()
    learner.mark("version", version=2)  # later than what other files hold
    learner.close()


def run_command(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    return ended.value.code


def test_all_processes_are_in_one_timeline_sorted_and_named(tmp_path, capsys):
    write_run(tmp_path)
    assert run_command("trace", tmp_path) == 0
    assert str(tmp_path / "timeline.json") in capsys.readouterr().out
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["learner", "generator-0", "generator-1"]
    assert {e["pid"] for e in events if e["name"] == "thread_name"} == set(names)
    timed = [event for event in events if event["ph"] != "M"]
    assert {event["pid"] for event in timed} == set(names)
    stamps = [event["ts"] for event in timed]
    assert stamps == sorted(stamps)
    assert stamps[0] == 0
    assert all(event["dur"] >= 0 for event in timed if event["ph"] == "X")
    kinds = [(names[e["pid"]], e["ph"], e["name"]) for e in timed]
    assert sorted(kinds) == sorted(
        [("learner", "i", "start"), ("learner", "X", "record"), ("learner", "X", "build"),
         ("learner", "i", "version"), ("learner", "C", "groups"), ("learner", "i", "version")]
        + [(f"generator-{i}", *what) for i in (0, 1) for what in (("i", "start"), ("X", "decode"))]
    )  # fmt: skip
    # The outer span comes before the inner one even if both begin in the same microsecond.
    assert kinds.index(("learner", "X", "record")) < kinds.index(("learner", "X", "build"))
    counted = next(event for event in timed if event["ph"] == "C")
    assert counted["args"] == {"queued": 2, "in_flight": 3}


def test_a_name_that_ends_in_gz_is_compressed(tmp_path):
    write_run(tmp_path)
    assert run_command("trace", tmp_path, "--out", tmp_path / "plain.json") == 0
    assert run_command("trace", tmp_path, "--out", tmp_path / "small.json.gz") == 0
    assert (
        gzip.decompress((tmp_path / "small.json.gz").read_bytes())
        == (tmp_path / "plain.json").read_bytes()
    )


def test_a_folder_without_a_trace_is_said_to_be_one(tmp_path, capsys):
    assert run_command("trace", tmp_path) == 1
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert "telemetry.trace" in said


def test_the_table_of_metrics_has_every_metric_once_and_every_alert(capsys):
    assert run_command("metrics") == 0
    lines = capsys.readouterr().out.splitlines()
    first = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(first) == sorted([*METRICS, *(alert.name for alert in ALERTS)])
    for name, metric in METRICS.items():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert line.endswith(metric.meaning)
        assert f" {metric.unit} " in line
    sections = [line for line in lines if line and not line.startswith(" ")]
    wanted = [
        "reward",
        "staleness",
        "mismatch",
        "loss",
        "throughput",
        "time",
        "queue",
        "eval",
        "alerts",
    ]
    assert sections == wanted  # "more" is for metrics whose family is in no section yet
