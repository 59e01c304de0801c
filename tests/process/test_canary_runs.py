"""Whole runs in which an engine does not have the learner's weights, and whole ones in which it does."""

import importlib.util
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.models import make_tiny_model
from tests.process.runs import (
    Finished,
    command_of,
    descendants,
    finish,
    records,
    start_run,
    wait_for,
    write_config,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

FAULT = """
import sys

if "generator" in sys.orig_argv:
    from asyncrl.generator.hf_engine import HFEngine

    adopt = HFEngine.adopt

    def faulty(self, version, tensors, *, file=None):
        turned = "model.layers.0.self_attn.q_proj.weight"
        adopt(self, version, ((n, v.T.contiguous() if n == turned else v) for n, v in tensors))

    HFEngine.adopt = faulty
"""
"""A sitecustomize.py: Python runs it in every process before anything else."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def generator_of(supervisor: int) -> int:
    return next(p for p in descendants(supervisor) if "asyncrl generator" in command_of(p))


def num_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_weights_that_are_spoiled_in_the_engine_end_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every digest is right; only the log-probs tell. No generator is started again to do the same."""
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    path = os.environ.get("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{path}")
    process = start_run(
        write_config(tmp_path, model), tmp_path / "run", "pipeline.num_steps=100000"
    )
    code, output = finish(process, timeout_s=60)
    assert code == 1, output
    # The first version that it adopts: of several that wait, only the newest is fetched.
    assert re.search(
        "FAILED: generator-0: WeightMismatchError: after adopting version [123], the log-probs of a "
        "fixed sequence differ between engine and learner by",
        output,
    ), output
    assert "restarting it" not in output


def test_a_generator_restarted_over_other_files_ends_the_run(model: Path, tmp_path: Path) -> None:
    """It would sample version 0 of another model until its first adoption."""
    used = Path(shutil.copytree(model, tmp_path / "used"))
    other = make_tiny_model(tmp_path / "other", seed=1)
    process = start_run(write_config(tmp_path, used), tmp_path / "run", "pipeline.num_steps=100000")
    wait_for(lambda: num_steps(tmp_path / "run") >= 2, process)
    # In the place of the old file: the generator may have that one mapped, and would die of SIGBUS.
    (other / "model.safetensors").replace(used / "model.safetensors")
    os.kill(generator_of(process.pid), signal.SIGKILL)
    code, output = finish(process, timeout_s=60)
    assert code == 1, output
    assert (
        "FAILED: generator-0: WeightMismatchError: engine and learner loaded model.path" in output
    )


def test_a_sound_run_in_bfloat16_passes_also_with_a_restarted_generator(
    model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start_run(
        write_config(tmp_path, model), run_dir, "pipeline.num_steps=80", "engine.dtype=bfloat16",
        "learner.dtype=bfloat16", "weights.transport=tcp",
    )  # fmt: skip
    wait_for(lambda: num_steps(run_dir) >= 3, process)
    os.kill(generator_of(process.pid), signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    last = records(run_dir)[-1]
    assert last["canary/checks"] >= 2  # of both generators
    assert 0 < last["canary/distance"] < 0.05
    assert all("time/probe_s" in record for record in records(run_dir))


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_a_sound_run_of_vllm_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # no warm-up
    model = make_tiny_model(tmp_path / "tiny", hidden=128)  # its CPU attention needs 32 a head
    run_dir = tmp_path / "run"
    code, output = finish(
        start_run(
            write_config(tmp_path, model), run_dir, "engine.kind=vllm", "engine.enforce_eager=true",
            "engine.dtype=bfloat16", "engine.max_prompt_tokens=32", "engine.max_completion_tokens=8",
            "engine.max_concurrent_completions=16", "pipeline.num_steps=40",
        ),
        timeout_s=150,
    )  # fmt: skip
    assert code == 0, output
    last = records(run_dir)[-1]
    assert last["canary/checks"] >= 1
    assert 0 < last["canary/distance"] < 0.1


def test_a_resumed_run_is_compared_too(finished: Finished, tmp_path: Path) -> None:
    """Its learner starts from a checkpoint, its generator from model.path."""
    run_dir = finished.copy(tmp_path)
    code, output = finish(
        start_run(finished.config, run_dir, "pipeline.num_steps=60", "checkpoint.resume=true")
    )
    assert code == 0, output
    last = records(run_dir)[-1]
    assert last["version"] == 60
    assert (
        last["canary/checks"] >= 1
    )  # of this attempt's generator, which reports four times a second
    assert 0 < last["canary/distance"] < 1e-5
