"""Whose folder it is, what remains of whom, and whose fault it was."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.causes import cause, error_file, root_cause
from asyncrl.cli import main
from asyncrl.config import RunConfig, read_config, to_toml
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.family import children, kill_orphans
from asyncrl.guard import record_first
from asyncrl.run_folder import check_model, exclusive, read_key, run_folder


def config(run_dir: Path | str = "", *, resume: bool = False) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "m"}, "task": {"kind": "repeat_letter"}, "run_dir": str(run_dir),
            "checkpoint": {"resume": resume},
        }
    )  # fmt: skip


def test_two_runs_that_begin_in_the_same_second_get_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with run_folder(config()) as first, run_folder(config()) as second:
        assert first != second
        assert first.parent == second.parent == tmp_path / "runs"


def test_a_folder_is_free_again_once_its_holder_has_ended(tmp_path: Path) -> None:
    with run_folder(config(tmp_path)), pytest.raises(ConfigError, match="in use"):
        run_folder(config(tmp_path)).__enter__()
    with run_folder(config(tmp_path)) as path:
        (path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="already holds a run"):
        run_folder(config(tmp_path)).__enter__()
    with pytest.raises(ConfigError, match="holds no checkpoints"):
        run_folder(config(tmp_path, resume=True)).__enter__()
    (tmp_path / "checkpoints").mkdir()
    with run_folder(config(tmp_path, resume=True)):
        pass


def test_a_folder_that_holds_an_adapter_is_not_said_to_hold_nothing(tmp_path: Path) -> None:
    at = config().model_copy(update={"model": ModelConfig(path=str(tmp_path))})
    with pytest.raises(ConfigError, match=r"holds no model \(no config\.json\)"):
        check_model(at)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an adapter, expected a whole model; merge it"):
        check_model(at)
    (tmp_path / "config.json").write_text("{}")
    check_model(at)


def saved_run(run_dir: Path, *overrides: str) -> Path:
    """What a run of one checkpoint leaves; its config file."""
    checkpoint = run_dir / "checkpoints" / "version-000050"
    checkpoint.mkdir(parents=True)
    path = run_dir / "config.toml"
    path.write_text(to_toml(config()))
    made = read_config(path, overrides)
    path.write_text(to_toml(made))
    facts = {"version": 50, "epoch": 0, "cursor": 50, "lineage": made.lineage, "run_name": "run"}
    (checkpoint / "checkpoint.json").write_text(json.dumps({"facts": facts, "files": {}}))
    (run_dir / "run.json").write_text('{"run_id": "r"}')
    (run_dir / "summary.json").write_text('{"outcome": "done"}')
    (run_dir / "lock").touch()
    return path


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        (["seed=3"], ["seed=0"], "(seed: 3 there, 0 here)"),
        ([], ["seed=1", "task.num_letters=3"],
         "(seed: 0 there, 1 here, task.num_letters: 4 there, 3 here)"),
        ([], ["task.kind=products"], '(task.kind: "repeat_letter" there, "products" here)'),
        ([], ["lora.rank=8", "lora.serving=merged"], "(lora.rank: 0 there, 8 here)"),
    ],
)  # fmt: skip
def test_a_resume_with_other_settings_is_refused_and_leaves_the_folder_as_it_was(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    there: list[str],
    here: list[str],
    words: str,
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    run_dir, path = tmp_path / "run", f"model.path={model}"
    file = saved_run(run_dir, *there, path)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    more = [f"run_dir={run_dir}", "checkpoint.resume=true", "pipeline.num_steps=60"]
    with pytest.raises(SystemExit) as end:
        main(["run", str(file), *here, *more])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert "start a new run_dir" in said
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_a_resume_compares_with_the_newest_checkpoint_that_can_be_read(tmp_path: Path) -> None:
    file = saved_run(tmp_path, "seed=3")
    (tmp_path / "checkpoints" / "version-000051").mkdir()
    more = [f"run_dir={tmp_path}", "checkpoint.resume=true", "pipeline.num_steps=60"]
    with pytest.raises(ConfigError, match="seed: 3 there, 4 here"):
        run_folder(read_config(file, ["seed=4", *more])).__enter__()
    with run_folder(read_config(file, more)):
        pass
    # A file that cannot tell them apart: one of another version, or one written over.
    file.write_text(to_toml(read_config(file, ["seed=4"])))
    with pytest.raises(ConfigError, match=r"\(lineage: \w{16} there, \w{16} here\)"):
        run_folder(read_config(file, more)).__enter__()
    file.write_text("seed = [")
    with pytest.raises(ConfigError, match=r"\(lineage: \w{16} there, \w{16} here\)"):
        run_folder(config(tmp_path, resume=True)).__enter__()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.*file/run.*Not a directory"):
        run_folder(config(tmp_path / "file" / "run")).__enter__()


def test_an_empty_or_unreadable_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the shared key"):
        read_key(tmp_path / "absent")
    (tmp_path / "key").write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        read_key(tmp_path / "key")
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read the shared key"):
        read_key(tmp_path / "key")


def test_a_file_system_without_locks_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    error = errno.ENOSYS  # as Lustre says without its mount option
    with exclusive(tmp_path, key="run_dir"):
        pass
    error = errno.EIO
    with pytest.raises(OSError, match="Input/output"), exclusive(tmp_path, key="run_dir"):
        pass


def record(run_dir: Path, name: str, kind: str, time_s: float, message: str = "m") -> None:
    path = error_file(run_dir, name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"type": kind, "message": message, "time_s": time_s}))


def test_the_earliest_error_is_the_cause_and_a_messenger_never_is(tmp_path: Path) -> None:
    record(tmp_path, "generator-0", "PeerLostError", 1.0)
    record(tmp_path, "broker", "PeerLostError", 2.0)
    # A learner killed by the kernel leaves no record; those who lost it do, and earlier than anybody.
    ended = [("generator-0", 1), ("broker", 1), ("learner", -9)]
    assert root_cause(tmp_path, ended).startswith("learner: killed by SIGKILL (by somebody, or by")
    assert "got shorter" in cause(tmp_path, "learner", -7)  # SIGBUS
    record(tmp_path, "learner", "NonFiniteLossError", 3.0)
    assert root_cause(tmp_path, ended).startswith("learner: NonFiniteLossError: m")
    assert root_cause(tmp_path, ended[:2]).startswith("generator-0: PeerLostError: m")


def test_a_cause_quotes_no_control_character_and_can_be_written(tmp_path: Path) -> None:
    record(tmp_path, "learner", "ConfigError", 1.0, message="\x1b[2J half \udc80\nof it")
    said = cause(tmp_path, "learner", 2)
    assert said == "learner: ConfigError: \u00b7[2J half \u00b7\nof it"
    said.encode()
    log = tmp_path / "logs/learner.log"
    log.parent.mkdir()
    log.touch()  # one that was started by hand has none
    assert cause(tmp_path, "learner", 2) == f"{said} (log: {log})"


def test_of_several_ranks_the_first_to_fail_is_on_record(tmp_path: Path) -> None:
    path = error_file(tmp_path, "learner")
    record_first(path, "first")
    record_first(path, "second")
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_that_a_full_disk_swallowed_is_put_down_to_it(tmp_path: Path) -> None:
    path = tmp_path / "errors"
    path.symlink_to("/dev/full")  # as little room as there is; not a folder either
    record_first(path / "learner.json", "x")
    assert root_cause(tmp_path, [("learner", 1)]) == "learner: exit code 1"
    # /proc is a file system without any free byte.
    assert "the disk of run_dir is full" in root_cause(Path("/proc"), [("learner", 1)])


ORPHAN = """
import subprocess, sys
from asyncrl.family import children, inherit_orphans, kill_orphans
import os, time
inherit_orphans()
mine = subprocess.Popen(["sleep", "60"])
subprocess.run(["sh", "-c", "(setsid sh -c 'sleep 61 & sleep 62') & exit 0"])
deadline = time.monotonic() + 10
while len(children(os.getpid())) < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
found = children(os.getpid())
assert kill_orphans({mine.pid}) == set()
print(len(found), children(os.getpid()) == {mine.pid}, mine.poll())
mine.kill()
"""


def test_orphans_are_inherited_and_killed_with_what_they_started() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "2 True None\n", done.stderr
    assert os.getpid() not in children(os.getpid())
    assert kill_orphans(children(os.getpid())) == set()


def test_a_learner_of_its_own_does_not_set_the_records_of_another_run_aside(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n[task]\nkind = "repeat_letter"\n')
    records = tmp_path / "manual" / "metrics.jsonl"
    records.parent.mkdir()
    records.write_text('{"step": 0}\n')
    command = [
        sys.executable, "-m", "asyncrl", "learner", str(tmp_path / "run.toml"),
        "--broker", "tcp://127.0.0.1:9", "--run-id", "r", "--run-dir", str(records.parent),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "already holds a run; give another one" in done.stderr
    assert "Traceback" not in done.stderr
    assert records.read_text() == '{"step": 0}\n'
    assert not list(tmp_path.rglob("*set-aside*"))
