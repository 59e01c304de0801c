"""Every second belongs to one cause: in running totals and in trace files, against a list of seconds."""

import json
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry.attribution import (
    attribute,
    kind_shares,
    merge,
    overlap_s,
    process_seconds,
    record_shares,
    run_times,
    share_values,
    totals_shares,
    training_window,
)
from asyncrl.telemetry.lives import read_lives
from asyncrl.telemetry.trace import Tracer, process_start_s

BEGIN_S = 1000
"""The scripts' clock starts here."""


@contextmanager
def scripted_clock():
    """Replaces the clock by a list of one number, which the test moves."""
    now_s = [float(BEGIN_S)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now_s[0])
        yield now_s


# A script is a list of whole seconds to pass and of spans: (name, script within).
scripts = st.recursive(
    st.lists(st.integers(0, 3), max_size=2),
    lambda inner: st.lists(
        st.one_of(st.integers(0, 3), st.tuples(st.sampled_from("abc"), inner)), max_size=4
    ),
    max_leaves=12,
)


def play(script, tracer, now_s):
    for item in script:
        if isinstance(item, int):
            now_s[0] += item
        else:
            with tracer.span(f"k/{item[0]}"):
                play(item[1], tracer, now_s)


def second_by_second(script, name="other"):
    """What each second belongs to, in order."""
    found = []
    for item in script:
        if isinstance(item, int):
            found += [name] * item
        else:
            found += second_by_second(item[1], item[0])
    return found


def counted(seconds):
    return {cause: float(number) for cause, number in Counter(seconds).items()}


def without_zeros(totals):
    return {name.partition("/")[2]: value for name, value in totals.items() if value}


@given(scripts, st.sampled_from([0.0, 2.0, 5.0]), st.integers(-2, 30), st.integers(0, 30))
def test_totals_and_files_equal_a_count_of_the_seconds(script, grain_s, first, length):
    expected = second_by_second(script)
    with scripted_clock() as now_s, TemporaryDirectory() as folder:
        tracer = Tracer(Path(folder, "trace/p.jsonl"), process="p", kind="k", grain_s=grain_s)
        play(script, tracer, now_s)
        assert without_zeros(tracer.totals()) == counted(expected)
        tracer.close()
        (life,) = read_lives(Path(folder))
    assert attribute(life) == counted(expected)
    if grain_s == 0:  # else spans in a row are summed up, and their places within it are not kept
        window = (BEGIN_S + first, BEGIN_S + first + length)
        assert attribute(life, window) == counted(expected[max(0, first) : max(0, first + length)])


@given(scripts, scripts)
def test_an_open_span_counts_up_to_the_moment_at_which_totals_are_asked_for(before, after):
    with scripted_clock() as now_s:
        tracer = Tracer(None, process="k")
        with tracer.span("k/open"):
            play(before, tracer, now_s)
            first = tracer.totals()
            play(after, tracer, now_s)
        second = tracer.totals()
    assert without_zeros(first) == counted(second_by_second(before, "open"))
    assert sum(second.values()) == now_s[0] - BEGIN_S
    step = {name: value - first.get(name, 0.0) for name, value in second.items()}
    assert without_zeros(step) == counted(second_by_second(after, "open"))


def test_a_span_measured_elsewhere_is_taken_from_the_one_that_is_open(tmp_path):
    # 10 s of decode, 4 s of them prefill; then 3 s of eval, whose prefill is left in it.
    with scripted_clock() as now_s:
        tracer = Tracer(tmp_path / "trace/g.jsonl", process="g", kind="generator")
        with tracer.span("generator/decode"):
            now_s[0] += 6
            tracer.add("generator/prefill", now_s[0] - 4, now_s[0], within="generator/decode")
            now_s[0] += 4
        with tracer.span("generator/eval"):
            now_s[0] += 3
            tracer.add("generator/prefill", now_s[0] - 1, now_s[0], within="generator/decode")
        totals = tracer.totals()
        tracer.close()
    expected = {"decode": 6.0, "prefill": 4.0, "eval": 3.0}
    assert without_zeros(totals) == expected
    assert attribute(*read_lives(tmp_path)) == expected


def test_starting_up_is_a_cause_and_reaches_back_to_the_exec(tmp_path):
    with scripted_clock() as now_s:
        tracer = Tracer(tmp_path / "trace/l.jsonl", process="l", kind="k", since_s=BEGIN_S - 7)
        now_s[0] += 2
        tracer.joined()
        now_s[0] += 1
        totals = tracer.totals()
        tracer.close()
    assert without_zeros(totals) == {"start": 9.0, "other": 1.0}
    assert attribute(*read_lives(tmp_path)) == {"start": 9.0, "other": 1.0}


def test_a_process_knows_when_it_was_started():
    age_s = time.monotonic() - process_start_s()
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert 0.0 <= age_s <= up_s


def test_short_spans_in_a_row_are_one_event_of_their_summed_length(tmp_path):
    # Three of 1 s with 1 s between them begin within 5 s, the fourth does not; adopt ends a row.
    path = tmp_path / "trace/g.jsonl"
    with scripted_clock() as now_s:
        tracer = Tracer(path, process="g", kind="generator", grain_s=5.0)
        for name in ("decode", "decode", "decode", "decode", "adopt", "decode"):
            with tracer.span(f"generator/{name}"):
                now_s[0] += 1
            now_s[0] += 1
        tracer.close()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    spans = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert spans == [
        ("generator/decode", 1000, 3), ("generator/decode", 1006, 1), ("generator/adopt", 1008, 1),
        ("generator/decode", 1010, 1),
    ]  # fmt: skip
    assert events[1]["args"] == {"spans": 3}
    assert attribute(*read_lives(tmp_path)) == {"decode": 5.0, "adopt": 1.0, "other": 6.0}


def test_short_spans_measured_elsewhere_are_summed_up_too(tmp_path):
    path = tmp_path / "trace/s.jsonl"
    with scripted_clock() as now_s:
        tracer = Tracer(path, process="s", kind="scorer", grain_s=5.0)
        now_s[0] += 20
        for start_s in (1001, 1003, 1004, 1008):
            tracer.add("scorer/score", start_s, start_s + 1)
        tracer.close()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    spans = [(e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert spans == [(1001, 3), (1008, 1)]
    assert attribute(*read_lives(tmp_path)) == {"score": 4.0, "other": 16.0}


def test_a_killed_life_ends_with_its_last_line_and_the_next_one_is_added(tmp_path):
    # Killed after 5 s, within a line; started again 100 s later, for 4 s.
    path = tmp_path / "trace/g.jsonl"
    with scripted_clock() as now_s:
        killed = Tracer(path, process="g", kind="generator")
        now_s[0] += 2
        with killed.span("generator/decode"):
            now_s[0] += 3
        with path.open("a") as file:
            file.write('{"name": "generator/adopt", "ph": "X", "ts": 10')
        now_s[0] += 100
        again = Tracer(path, process="g", kind="generator")
        with again.span("generator/decode"):
            now_s[0] += 4
        again.close()
    lives = read_lives(tmp_path)
    assert [(life.start_s, life.end_s) for life in lives] == [(1000, 1005), (1105, 1109)]
    assert process_seconds(lives) == {"g": {"other": 2.0, "decode": 7.0}}


def test_lives_of_another_boot_are_moved_by_their_wall_clocks(tmp_path):
    # One host's clock says 1000 when another's says 40; the second begins 6 s after the first.
    def begin(process, boot, mono_s, wall_s):
        event = {
            "name": "start", "ph": "i", "ts": mono_s * 10**6, "pid": process, "tid": process,
            "args": {"kind": "k", "boot": boot, "ahead_s": wall_s - mono_s},
        }  # fmt: skip
        span = {"name": "k/a", "ph": "X", "ts": (mono_s + 1) * 10**6, "dur": 2 * 10**6}
        mark = {"name": "version", "ph": "i", "ts": (mono_s + 1) * 10**6}
        path = tmp_path / "trace" / f"{process}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in (event, span, mark)))

    begin("far", "b", 46, 5006)
    begin("near", "a", 1000, 5000)
    near, far = read_lives(tmp_path)
    assert (near.process, near.start_s, near.spans[0].end_s) == ("near", 1000, 1003)
    assert (far.process, far.start_s, far.spans[0].end_s, far.end_s) == ("far", 1006, 1009, 1009)
    assert far.marks[0]["ts"] == 1007 * 10**6
    assert attribute(far) == {"other": 1.0, "a": 2.0}


def test_shares_of_totals_are_of_each_kinds_own_time_and_leave_other_counters_out():
    # Generators: 8 of 10 new seconds decode; scorers: 30 of 40; the broker's time did not move.
    before = {"generator/decode": 5.0, "generator/other": 1.0, "broker/idle": 3.0}
    now = {
        "generator/decode": 13.0, "generator/other": 2.0, "generator/eval": 1.0, "broker/idle": 3.0,
        "scorer/score": 30.0, "scorer/other": 10.0, "verdict/scored": 7.0, "sampled_tokens": 9.0,
    }  # fmt: skip
    shares = totals_shares(now, before)
    assert shares == {
        "generator": {"decode": 0.8, "other": 0.1, "eval": 0.1},
        "scorer": {"score": 0.75, "other": 0.25},
    }
    # A worker counts as busy until its verdict is seen, which then says that it was done before.
    assert totals_shares({"scorer/score": 4.0, "scorer/other": 9.0}, {"scorer/score": 4.5}) == {
        "scorer": {"score": 0.0, "other": 1.0}
    }
    record = {"step": 3, "version": 4, "bottleneck": "none", **share_values(shares)}
    assert record["share/generator@decode"] == 0.8
    assert record_shares(json.loads(json.dumps(record))) == shares
    assert record_shares({"step": 1}) == {}


def test_the_training_window_begins_with_the_first_batch_and_ends_with_the_last_version(tmp_path):
    with scripted_clock() as now_s:
        tracer = Tracer(tmp_path / "trace/learner.jsonl", process="learner", since_s=BEGIN_S - 5)
        tracer.joined()
        for waited_s in (8, 1):
            with tracer.span("learner/wait_batch"):
                now_s[0] += waited_s
            with tracer.span("learner/forward"):
                now_s[0] += 3
            tracer.mark("version", version=1)
        with tracer.span("learner/eval"):
            now_s[0] += 50
        tracer.close()
    lives = read_lives(tmp_path)
    assert training_window(lives) == (1008, 1015)
    shares = kind_shares(lives, training_window(lives))
    assert shares == {"learner": pytest.approx({"forward": 6 / 7, "wait_batch": 1 / 7})}
    assert training_window([]) is None


def test_overlap_of_a_run_is_read_from_its_files(tmp_path):
    with scripted_clock() as now_s:
        learner = Tracer(tmp_path / "trace/learner.jsonl", process="learner")
        generator = Tracer(tmp_path / "trace/g.jsonl", process="g", kind="generator")
        now_s[0] += 20
        learner.add("learner/backward", 1002, 1010)
        learner.add("learner/snapshot", 1010, 1012)
        generator.add("generator/decode", 1007, 1011)
        generator.add("generator/wait_credit", 1011, 1020)
    assert run_times(tmp_path) == {
        "learner_busy_s": 8.0, "generators_busy_s": 4.0, "both_busy_s": 3.0,
        "shares": {  # of the 20 and 12 s that they were heard of
            "g": {"decode": 0.2, "other": 0.35, "wait_credit": 0.45},
            "learner": {"backward": 0.6667, "other": 0.1667, "snapshot": 0.1667},
        },
    }  # fmt: skip
    (tmp_path / "trace/g.jsonl").unlink()
    assert run_times(tmp_path) == {}


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=12),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=12),
)
def test_overlap_equals_a_count_of_the_seconds_in_both(left, right):
    """Intervals on whole seconds, so that counting seconds is exact."""

    def covered(spans):
        return {second for start, length in spans for second in range(start, start + length)}

    def union(spans):
        return merge((float(start), float(start + length)) for start, length in spans)

    assert overlap_s(union(left), union(right)) == len(covered(left) & covered(right))
