"""Two vLLM engines and a learner on one GPU, the engines clients of a Multi-Process Service.

What the processes of a service can do to each other: one is killed in the middle of a step; another one,
which is no engine, faults on the GPU, which may end every client or itself alone (seen on
an H200). The run goes on from both.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.mps import CONTROL, PIPES
from tests.process.runs import command_of, descendants, finish, records, start_run, wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(not Path("models/smollm2-135m").exists(), reason="no model; make model"),
]

FAULT = "import torch; torch.zeros(8, device='cuda')[torch.tensor([99], device='cuda')].cpu()"


def test_a_run_outlives_a_killed_engine_and_a_fault_on_the_gpu(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_run(
        Path("launch/reverse_digits_1gpu.toml"), run_dir,
        "engine.engines_per_gpu=2", 'engine.mps="on"', "engine.max_concurrent_completions=256",
        "engine.enforce_eager=true", "pipeline.num_steps=5000", "eval.every_steps=0",
        "checkpoint.every_steps=5000",
    )  # fmt: skip

    def num_steps() -> int:
        path = run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def engines() -> dict[str, int]:
        """Process ids by name of those that have joined."""
        names = {path.name for path in (run_dir / "joined").glob("generator-*")}
        found = {p: command_of(p) for p in descendants(process.pid)}
        return {
            name: pid
            for name in names
            for pid, command in found.items()
            if "asyncrl generator" in command and f"--name {name} " in command
        }

    def restarted() -> list[str]:
        path = run_dir / "restarts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["process"] for line in lines]

    wait_for(lambda: num_steps() >= 3 and len(engines()) == 2, process, timeout_s=180)
    before = engines()
    pipes = {
        part.partition(b"=")[2].decode()
        for pid in before.values()
        for part in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if part.startswith(PIPES.encode())
    }
    assert len(pipes) == 1
    os.kill(before["generator-1"], signal.SIGKILL)
    wait_for(lambda: "generator-1" in restarted(), process)
    at = num_steps()
    wait_for(lambda: num_steps() > at and len(engines()) == 2, process, timeout_s=120)
    assert restarted() == ["generator-1"]  # the other one went on

    environment = os.environ | {PIPES: pipes.pop(), "CUDA_VISIBLE_DEVICES": "0"}
    rogue = subprocess.run(
        [sys.executable, "-c", FAULT], env=environment, capture_output=True, text=True, check=False
    )
    assert "CUDA error" in rogue.stderr
    at = num_steps()
    wait_for(lambda: num_steps() > at + 50 and len(engines()) == 2, process, timeout_s=200)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    print(output)
    print(json.loads((run_dir / "summary.json").read_text())["restarts"])
    assert code == 130, output
    assert max(step["staleness/max"] for step in records(run_dir)) <= 2
    assert subprocess.run(["pgrep", "-f", CONTROL], check=False).returncode == 1
    assert not any(Path("/tmp").glob("asyncrl-mps-*"))
