"""An adapter is trained by real processes, and a run with it goes on from its checkpoint."""

import importlib.util
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.models import make_tiny_model
from tests.process.runs import finish, records, start_run, write_config

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

SETTINGS = (
    "lora.rank=8", "lora.serving=merged", "optimizer.learning_rate=2e-3",
    "pipeline.groups_per_step=8", "pipeline.group_size=8", "engine.max_concurrent_completions=64",
    "eval.num_prompts=16", "eval.samples_per_prompt=4",
)  # fmt: skip


def test_an_adapter_learns_the_task_and_is_all_that_a_resumed_run_needs(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, make_tiny_model(tmp_path / "tiny"))
    code, output = finish(start_run(config, run_dir, *SETTINGS, "pipeline.num_steps=80"))
    assert code == 0, output
    before, after = (record["mean_score"] for record in records(run_dir, "evals"))
    assert before < 0.2
    assert after > 0.5
    steps = records(run_dir)
    assert max(record["staleness/max"] for record in steps) <= 2
    saved = run_dir / "checkpoints" / "version-000080"
    assert all(".lora_" in name for name in load_file(saved / "adapter_model.safetensors"))

    more = (
        *SETTINGS, "pipeline.num_steps=85", "pipeline.max_staleness=0", "checkpoint.resume=true",
    )  # fmt: skip
    code, output = finish(start_run(config, run_dir, *more))
    assert code == 0, output
    assert [record["version"] for record in records(run_dir)] == list(range(1, 86))
    assert records(run_dir, "evals")[-1]["mean_score"] > 0.5
    # Generators began with model.path again and were given the adapter before they sampled: in
    # float32, at staleness 0, the merged weights and the learner's two products differ by rounding.
    assert all(0 < record["mismatch/max"] < 1e-3 for record in records(run_dir)[80:])

    code, output = finish(start_run(config, run_dir, *more, "pipeline.num_steps=86", "lora.rank=4"))
    assert code == 2, output
    assert "another model, task, seed or adapter (lora.rank: 8 there, 4 here)" in output


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_samples_every_version_under_its_own_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, make_tiny_model(tmp_path / "tiny", hidden=128))
    process = start_run(
        config, run_dir, "lora.rank=8", "optimizer.learning_rate=5e-3", "pipeline.num_steps=5",
        "pipeline.max_staleness=0", "engine.kind=vllm", "engine.dtype=float32",
        "engine.enforce_eager=true", "engine.max_concurrent_completions=16",
        "engine.max_prompt_tokens=32", "engine.max_completion_tokens=8",
    )  # fmt: skip
    code, output = finish(process)
    assert code == 0, output
    steps = [record for record in records(run_dir) if not record["optimizer/skipped"]]
    assert len(steps) >= 4
    # At staleness 0 in float32 the learner's log-probs are the engine's.
    assert all(record["mismatch/max"] < 1e-3 for record in steps)
    for rollout in records(run_dir, "rollouts"):
        assert rollout["version_spans"] == [[rollout["step"], 0, rollout["num_tokens"]]]
