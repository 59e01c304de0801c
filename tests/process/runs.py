"""Starts real runs of the tiny model and reads what they left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CONFIG = """
name = "test"
[model]
path = "{model}"
[task]
kind = "repeat_letter"
num_letters = 4
[pipeline]
max_staleness = 2
groups_per_step = 4
group_size = 4
num_steps = 8
no_progress_s = 60.0
[engine]
dtype = "float32"
max_concurrent_completions = 16
max_prompt_tokens = 32
max_completion_tokens = 8
[learner]
dtype = "float32"
[optimizer]
learning_rate = 5e-3
[eval]
every_steps = 0
num_prompts = 4
samples_per_prompt = 2
[host]
start_timeout_s = 90.0
"""


def write_config(folder: Path, model: Path) -> Path:
    path = folder / "test.toml"
    path.write_text(CONFIG.format(model=model))
    return path


def start_run(config: Path, run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "asyncrl", "run", str(config), f'run_dir="{run_dir}"', *overrides,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], *, timeout_s: float = 110) -> tuple[int, str]:
    """Exit code and output; a run that does not end is killed and fails the test."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the run did not end within {timeout_s} s:\n{output}") from None
    return process.returncode, output


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that is done: its configuration, its folder, what it printed."""

    config: Path
    run_dir: Path
    output: str

    def copy(self, folder: Path) -> Path:
        """The run's folder once more, in `folder`, to go on from."""
        return Path(shutil.copytree(self.run_dir, folder / "run"))


def records(run_dir: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, read from /proc."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    found, stack = [], [pid]
    while stack:
        for child in children.get(stack.pop(), []):
            found.append(child)
            stack.append(child)
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], *, timeout_s: float = 90
) -> None:
    """Wait until `condition`; a run that ends or hangs before fails the test."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            output = process.communicate()[0] if process.poll() is not None else "(timeout)"
            raise AssertionError(f"the run ended or hung early:\n{output}")
        time.sleep(0.05)
