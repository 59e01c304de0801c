"""Several generators at one place: they start one after another, and map one copy of the weights."""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from asyncrl.child import STAGGER_S, Child
from tests.models import make_tiny_model
from tests.process.runs import (
    command_of,
    descendants,
    finish,
    records,
    start_run,
    wait_for,
    write_config,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

VLLM = (
    "engine.kind=vllm", "engine.enforce_eager=true", "engine.dtype=float32",
    "engine.max_concurrent_completions=16", "engine.max_prompt_tokens=32",
    "engine.max_completion_tokens=8", "engine.engines_per_gpu=2",
)  # fmt: skip

has_vllm = importlib.util.find_spec("vllm") is not None

WAITS_FOR_LEAVE = """
import pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
while not (folder / f"leave-{name}").exists():
    time.sleep(0.01)
(folder / "joined").mkdir(exist_ok=True)
(folder / "joined" / name).touch()
"""
"""An engine that joins when it is told to."""


def generators(supervisor: int) -> dict[str, int]:
    """Process ids of the living generators by name."""
    commands = {pid: command_of(pid).split() for pid in descendants(supervisor)}
    return {
        words[words.index("--name") + 1]: pid
        for pid, words in commands.items()
        if "generator" in words and "--name" in words
    }


def look(children: list[Child], folder: Path) -> list[str]:
    """What a supervisor does with waiting children in one turn; the names of those it started."""
    started = []
    for child in children:
        child.joined = child.joined_file(folder).exists()
    for child in children:
        if child.may_start(time.monotonic()):
            child.spawn(folder, pin=False)
            started.append(child.name)
    return started


def test_an_engine_starts_when_the_one_before_it_has_joined(tmp_path: Path) -> None:
    children: list[Child] = []
    for name in "abc":
        command = [sys.executable, "-c", WAITS_FOR_LEAVE, str(tmp_path), name]
        before = children[-1] if children else None
        children.append(Child(name, command, [0], None, 0, after=before))
    try:
        assert look(children, tmp_path) == ["a"]
        assert look(children, tmp_path) == []
        for child, following in zip(children, ["b", "c", None], strict=True):
            (tmp_path / f"leave-{child.name}").touch()
            assert child.process is not None
            assert child.process.wait(30) == 0
            assert look(children, tmp_path) == ([following] if following else [])
    finally:
        for child in children:
            child.signal_session(signal.SIGKILL)


def test_an_engine_that_does_not_join_holds_up_the_next_for_a_bounded_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITS_FOR_LEAVE, str(tmp_path), "a"]
    first = Child("a", command, [0], None, 0)
    second = Child("b", command, [0], None, 0, after=first)
    third = Child("c", command, [0], None, 0, after=second)
    first.spawn(tmp_path, pin=False)
    try:
        assert not second.may_start(first.started_s + STAGGER_S - 0.1)
        assert second.may_start(first.started_s + STAGGER_S + 0.1)
        assert not third.may_start(first.started_s + 10 * STAGGER_S)  # the second has not started
    finally:
        first.signal_session(signal.SIGKILL)
        assert first.process is not None
        first.process.wait(30)


@pytest.mark.vllm
@pytest.mark.skipif(not has_vllm, reason="vllm is not installed")
def test_when_the_first_engine_cannot_start_no_other_one_is_tried(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    settings = (*VLLM, "engine.tensor_parallel_size=3")  # 4 attention heads are not cut in 3
    process = start_run(write_config(tmp_path, model), tmp_path / "run", *settings)
    code, output = finish(process)
    assert code == 2, output
    assert "FAILED: generator-0: ConfigError" in output
    assert not (tmp_path / "run" / "logs" / "generator-1.log").exists()


@pytest.mark.vllm
@pytest.mark.skipif(not has_vllm, reason="vllm is not installed")
def test_two_vllm_engines_of_a_place_start_in_turn_and_both_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    model = make_tiny_model(tmp_path / "tiny", hidden=128)
    run_dir = tmp_path / "run"
    process = start_run(
        write_config(tmp_path, model), run_dir, *VLLM, "pipeline.num_steps=100000",
        "telemetry.alerts=off",
    )  # fmt: skip
    wait_for(lambda: "generator-1" in generators(process.pid), process)
    # It was started after that, so it is no question of when we look.
    assert (run_dir / "joined" / "generator-0").exists()

    def have_both_worked() -> bool:
        rollouts = run_dir / "rollouts.jsonl"
        return rollouts.exists() and '"generator-1"' in rollouts.read_text()

    wait_for(have_both_worked, process)
    names = {row["generator"] for row in records(run_dir, "rollouts")}
    assert names == {"generator-0", "generator-1"}
    os.kill(process.pid, signal.SIGINT)
    assert finish(process, timeout_s=30)[0] == 130


@pytest.mark.vllm
@pytest.mark.skipif(not has_vllm, reason="vllm is not installed")
def test_auto_is_measured_first_and_the_run_goes_on_with_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU that is one engine, and the kept configuration says so."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = make_tiny_model(tmp_path / "tiny", hidden=128)
    run_dir = tmp_path / "run"
    settings = (*VLLM[:-1], "engine.engines_per_gpu=auto", "pipeline.num_steps=2")
    code, output = finish(start_run(write_config(tmp_path, model), run_dir, *settings))
    assert code == 0, output
    assert "engine.engines_per_gpu=1: " in output
    assert "without a GPU they would take each other's cores" in output
    assert "engines_per_gpu = 1\n" in (run_dir / "config.toml").read_text()
    found = json.loads((run_dir / "probe.json").read_text())
    assert found["engines"] == 1
    assert found["options"][0]["rate"] > 0


def mapped(pid: int, run_id: str) -> set[tuple[str, str, str]]:
    """(device, inode, version) of the snapshots that a process maps, from /proc; "" once it ended."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    found = (line.split() for line in lines if f"/dev/shm/asyncrl-{run_id}-" in line)
    return {(words[3], words[4], words[5]) for words in found}


def test_generators_of_a_run_map_the_same_snapshot(tmp_path: Path) -> None:
    """18 million parameters in float32, so that reading a version takes a while."""
    model = make_tiny_model(tmp_path / "model", hidden=512, layers=4)
    run_dir = tmp_path / "run"
    process = start_run(
        write_config(tmp_path, model), run_dir, "pipeline.num_generators=2",
        "pipeline.num_steps=100000", "telemetry.alerts=off",
    )  # fmt: skip
    wait_for(lambda: len(generators(process.pid)) == 2, process)
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    seen: dict[str, set[tuple[str, str, str]]] = {}

    def have_both_mapped_one_file() -> bool:
        for name, pid in generators(process.pid).items():
            seen.setdefault(name, set()).update(mapped(pid, run_id))
        return len(seen) == 2 and bool(set.intersection(*seen.values()))

    wait_for(have_both_mapped_one_file, process)
    os.kill(process.pid, signal.SIGINT)
    assert finish(process, timeout_s=30)[0] == 130
