"""The main job in small: the packaged 135M model learns while it generates. Minutes; `make test-real`."""

import json
from pathlib import Path

import pytest

from tests.process.runs import finish, records, start_run

pytestmark = [pytest.mark.process, pytest.mark.real_model, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


def test_a_real_model_learns_to_reverse_digits(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_run(
        ROOT / "launch/reverse_digits_cpu.toml",
        run_dir,
        f'model.path="{ROOT}/models/smollm2-135m"',
        "pipeline.num_steps=16",
        "eval.every_steps=0",
    )
    code, output = finish(process, timeout_s=880)
    assert code == 0, output
    summary = json.loads((run_dir / "summary.json").read_text())
    # Recorded seeds: 0.13 to 0.17 before, 0.91 to 0.96 after 16 steps.
    assert summary["held_out_samples"] == 256
    assert summary["held_out_after"] >= summary["held_out_before"] + 0.4, summary
    assert summary["both_busy_s"] > 0
    assert max(record["staleness/max"] for record in records(run_dir)) <= 2
