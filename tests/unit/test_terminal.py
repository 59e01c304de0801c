"""What others say is printed on the terminal and never obeyed by it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.cli import main
from asyncrl.sweep.plan import plan_runs
from asyncrl.sweep.row import failed_row, write_row
from asyncrl.sweep.settings import read_sweep
from asyncrl.telemetry.terminal import printable, say, say_and_keep

ATTACK = "answer \x1b[2J\x1b]0;pwned\x07 \udc80\r\u202e"
SHOWN = "answer \u00b7[2J\u00b7]0;pwned\u00b7 \u00b7\u00b7\u00b7"


@given(st.text(st.characters(), max_size=60))
def test_lines_stay_lines_and_nothing_else_is_a_control_character(text):
    found = printable(text)
    assert [len(line) for line in found.split("\n")] == [len(line) for line in text.split("\n")]
    assert not {chr(code) for code in range(32)} - {"\n"} & set(found)
    found.encode()
    assert printable(found) == found


def test_what_a_run_says_is_shown_not_obeyed(capsys):
    say(f"FAILED: {ATTACK}\n  see rows.jsonl:100: [bold]x[/bold] caf\u00e9")
    # Neither markup nor names of emoji (":100:") mean anything.
    expected = f"FAILED: {SHOWN}\n  see rows.jsonl:100: [bold]x[/bold] caf\u00e9\n"
    assert capsys.readouterr().out == expected


def test_what_is_said_is_kept_too_and_a_full_disk_keeps_nobody_from_saying_it(tmp_path, capsys):
    path = tmp_path / "logs/supervisor.log"
    for line in ("first", ATTACK):
        say_and_keep(path)(line)  # each as of an attempt of its own
    kept = [line.split(" ", 2)[2] for line in path.read_text().split("\n")[:-1]]
    assert kept == ["first", SHOWN]  # behind date and time
    path.unlink()
    path.symlink_to("/dev/full")
    say_and_keep(path)("last")
    assert capsys.readouterr().out == f"first\n{SHOWN}\nlast\n"


def test_a_failed_run_of_a_sweep_is_reported_without_its_escape_sequences(tmp_path, capsys):
    file = Path("launch/sweep_smoke.toml")
    overrides = [f'out="{tmp_path}"']
    run = plan_runs(read_sweep(file, overrides))[0]
    run.run_dir.mkdir(parents=True)
    write_row(run.run_dir, failed_row(run, "answer \x1b[2J\x07", seconds=1.0))
    with pytest.raises(SystemExit) as end:
        main(["sweep", str(file), *overrides, "--report"])
    output = capsys.readouterr().out
    assert (end.value.code, "\x1b" in output) == (0, False)
    assert f"FAILED {run.name}: answer \u00b7[2J\u00b7" in output


def test_a_refused_data_file_is_quoted_without_its_escape_sequences(tmp_path, capsys):
    data, config = tmp_path / "rows.jsonl", tmp_path / "run.toml"
    data.write_text(r'{"prompt": "q", "\u001b[2J\u0007": "a"}')
    config.write_text(f'model = {{path = "m"}}\ntask = {{kind = "jsonl", path = "{data}"}}\n')
    with pytest.raises(SystemExit) as end:
        main(["run", str(config), f'run_dir="{tmp_path}/run"'])
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(
        "rows.jsonl:1: the key 'answer' is missing, got prompt, \u00b7[2J\u00b7\n"
    )
