"""Sweeps of real runs: ended at any moment, begun again, and never a run twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.models import make_tiny_model
from tests.process.runs import alive, descendants, finish, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

SMOKE = Path("launch/sweep_smoke.toml")
KEPT = {
    "config.toml", "console.log", "evals.jsonl", "logs", "metrics.jsonl", "row.json", "run.json",
    "summary.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def start_sweep(model: Path, out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "asyncrl", "sweep", str(SMOKE), f'out="{out}"',
        f'set.model.path="{model}"', "set.pipeline.num_steps=6", "set.eval.every_steps=3", *arguments,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def rows(out: Path) -> dict[str, str]:
    """The text of every row by the run's name."""
    return {path.parent.name: path.read_text() for path in (out / "runs").glob("*/row.json")}


def gone(pids: list[int], *, timeout_s: float = 10.0) -> bool:
    """Whether all have ended; a killed one's own children are killed by the kernel a moment later."""
    deadline_s = time.monotonic() + timeout_s
    while any(map(alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_an_interrupted_sweep_goes_on_and_repeats_nothing(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start_sweep(model, out)
    wait_for(lambda: len(rows(out)) == 1 and len(descendants(process.pid)) >= 2, process)
    started = descendants(process.pid)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert gone(started)
    first = rows(out)
    assert len(first) == 1, output

    num_parallel = min(2, len(os.sched_getaffinity(0)))
    code, output = finish(start_sweep(model, out, f"num_parallel={num_parallel}"), timeout_s=200)
    assert code == 0, output
    assert "1 of 4 runs were finished before" in output
    found = rows(out)
    assert len(found) == 4
    assert found.items() >= first.items()  # the same bytes: it was not made again
    for name, text in found.items():
        row = json.loads(text)
        assert row["staleness"]["max"] <= row["k"]
        assert row["trained_samples"] == 6 * 8 * 8
        assert row["curve"][-1]["version"] == 6
        if name not in first:
            share = len(os.sched_getaffinity(0)) // num_parallel
            assert row["provenance"]["hardware"]["cores"] in (share, share + 1)
    result = json.loads((out / "sweep.json").read_text())
    assert (result["missing"], result["failed"]) == ([], {})
    assert all(
        "k = 2 has 2 seeds and at least 3 are needed" in v["sentence"] for v in result["verdict"]
    )
    assert (out / "sweep.html").read_text().count("data:image/png") in (0, 5)  # with matplotlib: 5
    for folder in (
        out / "runs"
    ).iterdir():  # whatever a run writes, its sweep keeps no more than this
        assert {path.name for path in folder.iterdir()} == KEPT

    code, output = finish(start_sweep(model, out))
    assert code == 0, output
    assert "4 of 4 runs were finished before" in output
    assert "started" not in output


def test_a_killed_sweep_leaves_no_process_and_resumes_a_half_run(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    settings = ("grid.seed=[0]", "grid.staleness=[{pipeline.max_staleness=1}]",
                "set.checkpoint.every_steps=2", "set.pipeline.num_steps=60",
                "set.eval.every_steps=0")  # fmt: skip
    process = start_sweep(model, out, *settings)
    folder = out / "runs/clipped_tis-k1-s0"
    wait_for(lambda: any(folder.glob("checkpoints/version-*")), process)
    started = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert gone(started)
    assert not (folder / "row.json").exists()

    code, output = finish(start_sweep(model, out, *settings))
    assert code == 0, output
    assert "clipped_tis-k1-s0: resumed" in output
    row = json.loads((folder / "row.json").read_text())
    assert row["attempts"] == 2
    versions = [point["version"] for point in row["curve"]]
    assert (versions[0], versions[-1]) == (0, 60)


def test_a_failed_run_is_recorded_and_the_sweep_goes_on(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, output = finish(
        start_sweep(
            model, out, "grid.seed=[0]", "grid.staleness=[{pipeline.max_staleness=0}]",
            "variants.broken.optimizer.learning_rate=1e30",
            "variants.broken.optimizer.max_skipped_steps=1", "variants.last.seed=0",
        )
    )  # fmt: skip
    assert code == 1, output
    result = json.loads((out / "sweep.json").read_text())
    assert list(result["failed"]) == ["broken-k0-s0"]
    cause = result["failed"]["broken-k0-s0"]
    assert "learner: " in cause or "generator-0: " in cause  # who failed, in its own words
    assert {row["name"] for row in result["rows"] if row["outcome"] == "done"} == {
        "clipped_tis-k0-s0", "last-k0-s0",
    }  # fmt: skip
    assert "FAILED broken-k0-s0" in output


def test_a_sweep_that_is_in_use_or_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start_sweep(model, out)
    wait_for(lambda: (out / "lock-0-of-1").exists() and bool(descendants(process.pid)), process)
    code, output = finish(start_sweep(model, out))
    assert code == 2, output
    assert "is in use" in output
    code, output = finish(start_sweep(model, out, "--shard=0/2"))
    assert (code, "with --shard I/1, and this one has I/2" in output) == (2, True), output
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process)[0] == 130
    code, output = finish(start_sweep(model, out, "num_parallel=100000"))
    assert code == 2, output
    assert "num_parallel=100000" in output
    code, output = finish(start_sweep(model, out, "--shard=4/4"))
    assert (code, "0 <= I < N" in output) == (2, True), output
