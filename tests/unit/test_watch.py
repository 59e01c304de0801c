"""The live view: what a frame says, and that a completion is never a command to the terminal."""

import io
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.cli import main
from asyncrl.config import RunConfig
from asyncrl.report.files import read_tail
from asyncrl.report.frame import frame, sparkline
from asyncrl.report.state import RunState
from asyncrl.report.watch import watch
from asyncrl.run_folder import run_folder
from asyncrl.telemetry.sinks import set_later_aside
from asyncrl.telemetry.terminal import plain
from tests.unit.run_folders import make_run, rollout_record, step_record, write_lines


def console(width=140):
    return Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)


def drawn(run_dir, **how):
    screen = console(**how)
    screen.print(frame(RunState(run_dir)))
    return screen.file.getvalue()


def append(path, *records):
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_a_frame_says_how_far_how_good_how_old_and_who_waits(tmp_path):
    run_dir = make_run(tmp_path / "run")
    append(
        run_dir / "metrics.jsonl",
        step_record(4, alerts=["mismatch"], new_alerts=["mismatch: too far [red]now[/red]"]),
    )
    drop = {"group_id": 77, "version": 3, "reason": "zero_signal"}
    write_lines(run_dir / "drops.jsonl", [drop])
    text = drawn(run_dir)
    for part in (
        "made  done  5 of 4 steps", "0 → 0.04", "mean 1.00, largest 2 of k = 2", "67%", "33%",
        "k3 2.5e-01", "waits 50%", "generation is the bottleneck", "admitted", "20",
        "group 77 at version 3: zero_signal", "on: mismatch",
        "step 4: mismatch: too far [red]now[/red]", "prompt 7 → completion 1",
    ):  # fmt: skip
        assert part in text, (part, text)


def test_a_frame_names_the_last_two_that_were_started_again(tmp_path):
    run_dir = make_run(tmp_path / "run")
    ends = [{"process": f"generator-{i}", "cause": "[b]why[/b]", "time": "noon"} for i in range(3)]
    write_lines(run_dir / "restarts.jsonl", ends)
    text = drawn(run_dir)
    assert text.count("started again") == 2
    for i in (1, 2):
        assert f"generator-{i}: [b]why[/b]; started again at noon\n" in text


def test_an_alert_about_staleness_stands_beside_the_advice_that_it_speaks_against(tmp_path):
    run_dir = make_run(tmp_path / "run")
    assert "speak against" not in drawn(run_dir, width=600)
    append(run_dir / "metrics.jsonl", step_record(4, alerts=["mismatch"]))
    assert "but alerts speak against it: mismatch)" in drawn(run_dir, width=600)


def test_drops_with_a_payload_of_a_megabyte_are_shown(tmp_path):
    run_dir = make_run(tmp_path / "run")
    # In base64 a payload of 2^20 bytes, the largest that is kept, has 4 characters for every 3 bytes.
    drops = [
        {"group_id": i, "version": 3, "reason": "zero_signal", "payload": ["A" * (2**22 // 3)]}
        for i in range(70, 76)
    ]
    write_lines(run_dir / "drops.jsonl", drops)
    text = drawn(run_dir)
    assert "group 74 at version 3: zero_signal" in text
    assert "group 75 at version 3: zero_signal" in text


def test_the_last_groups_are_shown_also_if_their_lines_are_long(tmp_path):
    run_dir = make_run(tmp_path / "run", steps=4, groups=2, size=2)
    path = run_dir / "rollouts.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    # 16 lines of more than 64 KiB: what is read at first does not hold one.
    write_lines(path, [record | {"text": "x" * 70_000} for record in records])
    assert [row["group_id"] for row in RunState(run_dir).rollouts] == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("length", [0, 10_000, 70_000, 300_000])
@pytest.mark.parametrize("end", ["", '{"n": 99, "cut', "null\n"])
def test_the_tail_of_a_file_has_its_last_whole_lines(tmp_path, length, end):
    path = tmp_path / "x.jsonl"
    records = [{"n": n, "text": "x" * length} for n in range(20)]
    write_lines(path, records)
    with path.open("a") as file:
        file.write(end)
    found = read_tail(path, 6)
    assert len(found) >= 6
    assert found == records[-len(found) :]


def test_the_tail_of_a_file_of_one_endless_line_is_empty(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('"' + "x" * 2**23)
    assert read_tail(path, 1) == []
    assert read_tail(tmp_path / "missing", 1) == []


def test_a_run_without_a_step_has_a_frame(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    assert "running" in drawn(run_dir)  # its record was written a moment ago


@given(st.text(max_size=60), st.integers(1, 80))
def test_nothing_but_printable_characters_of_one_line_reaches_the_terminal(text, limit):
    found = plain(text, limit)
    assert len(found) <= limit
    assert all(c.isprintable() for c in found if not c.isspace())
    assert not set(found) & set("\x1b\x07\r\n\t\x9b\u202e\u200f")


def test_escape_sequences_and_markup_of_a_completion_are_shown_not_obeyed(tmp_path):
    run_dir = make_run(tmp_path / "run")
    attack = "\x1b[2J\x1b]0;owned\x07 [bold]x[/bold] [link=http://x]y[/link]\r\u202e"
    write_lines(run_dir / "rollouts.jsonl", [rollout_record(0, 0, 0, text=attack, prompt=attack)])
    text = drawn(run_dir, width=220)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]x[/bold]" in text


def test_a_sparkline_goes_from_the_least_to_the_most():
    assert sparkline([], 10) == ""
    assert sparkline([3.0], 10) == "▁"
    assert sparkline([0.0, 1.0, 2.0, 7.0], 10) == "▁▂▃█"  # 0, 1, 2 and 7 sevenths
    assert sparkline([0.0, 0.0, 7.0, 7.0], 2) == "▁█"


def test_steps_that_are_made_again_replace_those_of_the_attempt_before(tmp_path):
    run_dir = make_run(tmp_path / "run")
    path = run_dir / "metrics.jsonl"
    append(path, step_record(4, new_alerts=["a: old"]))
    state = RunState(run_dir)
    assert list(state.rewards) == [0, 1, 2, 3, 4]
    set_later_aside(path, key="step", limit=2)
    append(path, step_record(2, **{"reward/mean": 0.9}))
    state.read()
    assert state.rewards == {0: 0.0, 1: 0.01, 2: 0.9}
    assert state.alerts == []
    assert state.last["step"] == 2


def test_an_evaluation_without_a_score_is_no_point_of_the_curve(tmp_path):
    run_dir = make_run(tmp_path / "run", steps=4)  # 0 at version 0, 1 at version 4
    append(run_dir / "evals.jsonl", {"version": 9, "mean_score": None, "num_samples": 0})
    assert RunState(run_dir).evals == {0: 0.0, 4: 1.0}
    assert "at version 4" in drawn(run_dir)


def test_a_broken_line_is_passed_over(tmp_path):
    run_dir = make_run(tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "cut\n' + json.dumps(step_record(5)) + "\n" + '{"step": 6')
    assert list(RunState(run_dir).rewards) == [0, 1, 2, 3, 5]


def test_once_prints_one_frame_also_of_a_run_that_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    run_dir = make_run(tmp_path / "run")
    config = RunConfig.model_validate(
        {
            "model": {"path": "x"},
            "task": {"kind": "repeat_letter"},
            "run_dir": str(tmp_path / "own"),
        }
    )
    with run_folder(config) as folder:
        make_run(folder)
        for path, state in ((folder, "running"), (run_dir, "done")):
            with pytest.raises(SystemExit) as end:
                main(["watch", str(path), "--once"])
            assert end.value.code == 0
            assert f"made  {state}  4 of 4 steps" in capsys.readouterr().out


def test_watching_ends_with_the_run(tmp_path):
    config = RunConfig.model_validate(
        {
            "model": {"path": "x"},
            "task": {"kind": "repeat_letter"},
            "run_dir": str(tmp_path / "own"),
        }
    )
    screen = console()
    with run_folder(config) as folder:
        make_run(folder)
        (folder / "summary.json").unlink()
        viewer = threading.Thread(
            target=watch, args=(folder,), kwargs={"once": False, "console": screen}, daemon=True
        )
        viewer.start()
        append(folder / "metrics.jsonl", step_record(4))
        (folder / "summary.json").write_text('{"outcome": "done"}')
        assert viewer.is_alive()
    viewer.join(30)
    assert not viewer.is_alive()
    assert "done  5 of 4 steps" in screen.file.getvalue()


def test_a_folder_that_holds_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path), "--once"])
    assert end.value.code == 2
    assert "not the folder of a run" in capsys.readouterr().err
