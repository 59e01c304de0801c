"""An engine that is killed ends its run with its name, in bounded time, and leaves nothing behind."""

import importlib.util
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.models import make_tiny_model
from tests.process.runs import (
    alive,
    command_of,
    descendants,
    finish,
    start_run,
    wait_for,
    write_config,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

HF = ("engine.kind=hf",)
VLLM = ("engine.kind=vllm", "engine.enforce_eager=true")
PARALLEL = (*VLLM, "engine.tensor_parallel_size=2")
without_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=128)


def start(
    model: Path, folder: Path, engine: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> subprocess.Popen[str]:
    """A run that has trained a step, and will not end by itself."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # no warm-up
    settings = ("engine.dtype=float32", "engine.max_prompt_tokens=32", *engine[1:])
    sizes = ("engine.max_completion_tokens=8", "engine.max_concurrent_completions=16")
    process = start_run(
        write_config(folder, model), folder / "run", engine[0], *settings, *sizes,
        "pipeline.num_steps=100000", "host.max_generator_restarts=0", "host.start_timeout_s=150.0",
    )  # fmt: skip
    metrics = folder / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, process, timeout_s=150)
    return process


def child(supervisor: int, words: str) -> int:
    return next(pid for pid in descendants(supervisor) if words in command_of(pid))


@pytest.mark.parametrize(
    "engine", [HF, pytest.param(PARALLEL, marks=[pytest.mark.vllm, without_vllm])]
)
def test_a_killed_generator_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: tuple[str, ...]
) -> None:
    process = start(model, tmp_path, engine, monkeypatch)
    family = descendants(process.pid)
    os.kill(child(process.pid, "asyncrl generator"), signal.SIGKILL)
    code, output = finish(process, timeout_s=60)
    assert code == 1, output
    assert "FAILED: generator-0: killed by SIGKILL" in output
    assert not [command_of(pid) for pid in family if alive(pid)]


@pytest.mark.vllm
@without_vllm
def test_a_killed_worker_of_vllm_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(model, tmp_path, PARALLEL, monkeypatch)
    family = descendants(process.pid)
    worker = child(process.pid, "VLLM::Worker_TP1")
    os.kill(worker, signal.SIGKILL)
    code, output = finish(process, timeout_s=60)
    assert code == 1, output
    assert "FAILED: generator-0: PeerLostError: a worker process of the engine has died: " in output
    assert f"(pid {worker}, killed by SIGKILL)" in output
    assert not [command_of(pid) for pid in family if alive(pid)]
