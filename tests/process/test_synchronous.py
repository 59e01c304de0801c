"""k = 0 through the real processes equals a plain sequential loop, number for number (F023)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from asyncrl.broker.groups import derive_seed
from asyncrl.config import read_config
from asyncrl.generator.engine import SampleRequest
from asyncrl.generator.hf_engine import HFEngine
from asyncrl.learner.model import Policy
from asyncrl.learner.optimizer import Optimizer
from asyncrl.tasks import make_task
from asyncrl.types import Rollout, RolloutGroup, Verdict
from tests.models import make_tiny_model
from tests.process.runs import finish, records, start_run, write_config
from tests.reference.stepping import pack, run_step

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

NUM_STEPS = 5
GROUPS, SIZE = 4, 4  # as in runs.CONFIG


def test_synchronous_run_equals_a_sequential_loop(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    file = write_config(tmp_path, model)
    overrides = ["pipeline.max_staleness=0", f"pipeline.num_steps={NUM_STEPS}", "seed=7"]
    run_dir = tmp_path / "run"
    code, output = finish(start_run(file, run_dir, *overrides))
    assert code == 0, output
    expected = list(sequential_loop(read_config(file, overrides)))
    steps, rollouts = records(run_dir), records(run_dir, "rollouts")
    for step, (texts, result, num_tokens) in enumerate(expected):
        assert [r["text"] for r in rollouts if r["step"] == step] == texts
        assert steps[step].get("skipped", "") == result.skipped
        if not result.skipped:
            loss = result.sums["loss/policy"] / num_tokens
            assert steps[step]["loss/policy"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
            grad_norm = result.values["optimizer/grad_norm"]
            assert steps[step]["optimizer/grad_norm"] == pytest.approx(grad_norm, rel=1e-4)
    # Weights moved, so that later steps compare more than the initial model.
    assert sum(not result.skipped for _, result, _ in expected) >= 3


def sequential_loop(config):
    """Sample, score, train, copy the weights: texts, result and N of each step."""
    torch.manual_seed(config.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    task = make_task(config.task, seed=config.seed)
    engine = HFEngine(
        config.model.path, device="cpu", dtype="float32", max_concurrent_completions=SIZE
    )
    policy = Policy.load(config.model.path, device=torch.device("cpu"), compute_dtype=torch.float32)
    settings = config.optimizer.model_dump(exclude={"max_skipped_steps"})
    optimizer = Optimizer(policy, **settings)
    for step in range(NUM_STEPS):
        groups = [
            sample_group(config, engine, tokenizer, task, step * GROUPS + index)
            for index in range(GROUPS)
        ]
        batch = pack(
            groups,
            version=step,
            micro_batch_tokens=config.learner.micro_batch_tokens,
            skip_zero_advantage=True,
        )
        result = run_step(policy, optimizer, batch)
        texts = [rollout.text for group in groups for rollout in group.rollouts]
        yield texts, result, batch.num_tokens
        state = {name: value.detach() for name, value in policy.named_weights()}
        engine.adopt(step + 1, state.items())


def sample_group(config, engine, tokenizer, task, number: int) -> RolloutGroup:
    """Group `number` of the run: group ids and prompt ordinals both count from 0."""
    problem = task.problem("train", number)
    prompt = np.asarray(tokenizer.encode(problem.raw_text), np.int32)
    engine.submit(
        SampleRequest(
            request_id=number,
            prompt_tokens=prompt,
            num_completions=SIZE,
            seed=derive_seed(config.seed, number, 0),
            max_tokens=config.engine.max_completion_tokens,
        )
    )
    done = []
    while len(done) < SIZE:
        done += engine.step()
    rollouts = []
    for completion in sorted(done, key=lambda c: c.index):
        text = tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True)
        rollouts.append(
            Rollout(
                completion_tokens=completion.tokens,
                behaviour_logprobs=completion.behaviour_logprobs,
                version_spans=completion.version_spans,
                finish_reason=completion.finish_reason,
                text=text,
                verdict=Verdict(status="scored", score=task.score(problem, text)),
            )
        )
    return RolloutGroup(
        group_id=number,
        ordinal=number,
        prompt_tokens=prompt,
        prompt_text=problem.raw_text,
        answer=problem.answer,
        rollouts=tuple(rollouts),
    )
