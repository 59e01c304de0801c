"""What is read back from disk: whole objects and finite numbers, whatever else lies there."""

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.causes import root_cause
from asyncrl.cli import main
from asyncrl.telemetry.console import Follower
from asyncrl.telemetry.jsonlines import LARGEST, integer, number, parse, read_lines, tree
from asyncrl.telemetry.lives import read_lives
from asyncrl.telemetry.timeline import timeline

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
DEEP = b"[" * 200_000
START = {
    "name": "start", "ph": "i", "ts": 0, "pid": "learner",
    "args": {"kind": "learner", "boot": "b", "ahead_s": 5.0},
}  # fmt: skip
SPAN = {"name": "learner/forward", "ph": "X", "ts": 1_000_000, "dur": 2_000_000, "pid": "learner"}


@example(DEEP)
@example(b'{"a": ' + DEEP)
@given(st.binary(max_size=30))
def test_a_line_is_an_object_or_nothing(line):
    found = parse(line)
    assert found is None or isinstance(found, dict)


def test_names_of_numbers_that_json_has_not_are_none():
    assert parse(b'{"a": NaN, "b": [-Infinity, 1.5]}') == {"a": None, "b": [None, 1.5]}


@example(10**400)
@example(1e999)
@example(LARGEST)
@given(VALUES)
def test_a_number_is_finite_and_an_integer_exact(value):
    found = number(value)
    assert found is None or (math.isfinite(found) and found == value)
    whole = integer(value)
    assert whole is None or (type(whole) is int and int(float(whole)) == value)


@example([[]] * 3 + [{"a": 1e999}])
@given(VALUES)
def test_a_tree_is_json_of_bounded_depth(value):
    assert json.loads(json.dumps(tree(value), allow_nan=False)) == tree(value)
    nested = value
    for _ in range(30):
        nested = [nested]
    assert json.dumps(tree(nested)) == "[" * 20 + "null" + "]" * 20


def test_a_file_that_is_a_folder_has_no_lines(tmp_path):
    assert list(read_lines(tmp_path)) == []
    assert list(Follower(tmp_path).new()) == []


def test_a_follower_passes_over_what_is_no_object(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\nnull\n[]\n\xff\n' + DEEP + b'\n{"a": 2}\n')
    follower = Follower(path)
    assert list(follower.new()) == [{"a": 1}, {"a": 2}]
    with path.open("ab") as file:
        file.write(b'{"a": 3}\n')
    assert list(follower.new()) == [{"a": 3}]


def test_events_of_another_form_are_passed_over(tmp_path, capsys):
    (tmp_path / "trace" / "a-folder.jsonl").mkdir(parents=True)
    lines = [
        b"{}", b"null", DEEP, json.dumps(START).encode(), b"{}", b'{"name": "start", "ts": 3}',
        b'{"name": "x", "ph": "X", "ts": "soon"}', b'{"name": "x", "ph": "X", "ts": 1, "dur": -1}',
        b'{"name": "version", "ph": "i", "ts": 1e999}', b'{"name": [], "ph": "X", "ts": 1}',
        b'{"name": "version", "ph": "i", "ts": 2000000, "args": null}', json.dumps(SPAN).encode(),
    ]  # fmt: skip
    (tmp_path / "trace" / "learner.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    [life] = read_lives(tmp_path)
    assert (life.start_s, life.end_s) == (0.0, 3.0)
    assert life.spans == [("learner/forward", 1.0, 3.0)]
    assert life.marks == [{"name": "version", "ph": "i", "ts": 2_000_000}]
    with pytest.raises(SystemExit) as end:
        main(["trace", str(tmp_path)])
    assert end.value.code == 0
    assert "6 events" in capsys.readouterr().out  # 3 names, the start, a mark and a span


@example([{"name": "version", "ph": "i", "ts": 2**60, "dur": 10**30}])
@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys((*SPAN, "args"), VALUES))))
def test_a_timeline_can_be_written_whatever_the_events_hold(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("run")
    (folder / "trace").mkdir()
    changed = [SPAN | event for event in events] + [START | event for event in events]
    lines = [json.dumps(event) for event in (START, *changed, *events, SPAN)]
    (folder / "trace" / "learner.jsonl").write_text("\n".join(lines))
    lives = read_lives(folder)
    assert any(SPAN["name"] == span.name for life in lives for span in life.spans)
    json.dumps(timeline(lives), allow_nan=False)


@pytest.mark.parametrize(
    "content",
    [b"{}", b"", b"\xff\xfe{", DEEP, b'{"type": "A", "message": "b"}', b'{"time_s": 1.0}'],
)
def test_an_error_that_is_not_of_the_form_of_one_is_told_by_its_exit_code(tmp_path, content):
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "learner.json").write_bytes(content)
    assert root_cause(tmp_path, [("learner", 1)]) == "learner: exit code 1"
    log = tmp_path / "logs" / "learner.log"
    log.parent.mkdir()
    log.touch()
    assert root_cause(tmp_path, [("learner", 1)]) == f"learner: exit code 1 (log: {log})"
