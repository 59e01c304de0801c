"""Corrections, diagnostics and the gradient sketch inside a real step of a tiny model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.learner.gradients import GradientSketch
from asyncrl.learner.objective import Objective
from tests.models import make_tiny_model
from tests.reference.groups import group, random_groups, rollout
from tests.reference.stepping import (
    everything,
    gradient_after_first_step,
    identical,
    load_policy,
    make_optimizer,
    micro_batches,
    pack,
    replace_micro_batches,
    run_step,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def with_correction(kind):
    return Objective.of(AlgorithmConfig.model_validate({"correction": {"kind": kind}}))


def test_rejected_completions_leave_the_gradient_of_the_others_and_the_denominator_alone(
    model_path,
):
    # F005: the veto drops one of four completions; N stays the number of all tokens.
    def groups(odd):
        members = [
            rollout([5, 6, 7], score=1.0, logprobs=[-3.0, odd, -3.0]),
            rollout([8, 9], score=0.0, logprobs=[-3.0, -3.0]),
        ]
        return [
            group([9], members, group_id=0),
            group(
                [3, 4],
                [*members[1:], rollout([7, 7], score=1.0, logprobs=[-3.0, -3.0])],
                group_id=1,
            ),
        ]

    policy = load_policy(model_path)
    step = pack(groups(-40.0))
    result = run_step(
        policy,
        optimizer := make_optimizer(policy),
        step,
        objective=with_correction("veto"),
    )
    found = gradient_after_first_step(optimizer)
    assert result.sums["correction/vetoed_sequences"] == 1
    assert result.sums["correction/dropped"] == 3
    assert step.num_tokens == 9
    # The same step, told by hand to weigh the odd completion with 0.
    weighed = replace_micro_batches(
        step,
        [
            replace(
                micro,
                advantages=np.where(
                    np.isin(micro.sequence, micro.sequence[micro.behaviour_logprobs < -30]),
                    0.0,
                    micro.advantages,
                ).astype(np.float32),
            )
            for micro in micro_batches(step)
        ],
    )
    other = load_policy(model_path)
    run_step(other, optimizer := make_optimizer(other), weighed)
    for name, wanted in gradient_after_first_step(optimizer).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-7)


def test_a_step_whose_completions_are_all_rejected_is_skipped(model_path):
    # F005.
    # Adam has momentum from the step before: an update by a gradient of 0 would move the weights.
    policy = load_policy(model_path)
    optimizer = make_optimizer(policy, weight_decay=0.1)
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    run_step(policy, optimizer, pack(groups))
    before = everything(policy, optimizer)
    members = [rollout([5], score=s, logprobs=[-60.0]) for s in (0.0, 1.0)]
    result = run_step(
        policy, optimizer, pack([group([1], members)]), objective=with_correction("veto")
    )
    assert result.skipped == "all rejected"
    assert result.num_nonfinite == 0
    assert result.sums["correction/vetoed_sequences"] == 2
    assert identical(everything(policy, optimizer), before)


def test_without_diagnostics_the_update_is_the_same(model_path):
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    with_them, without = load_policy(model_path), load_policy(model_path)
    one, other = make_optimizer(with_them), make_optimizer(without)
    measured = run_step(with_them, one, pack(groups))
    bare = run_step(without, other, pack(groups), diagnose=False)
    assert identical(everything(with_them, one), everything(without, other))
    assert bare.sums == measured.sums
    assert not [name for name in bare.values if name.startswith("mismatch/")]


def test_the_cosine_of_two_steps_over_the_same_batch_is_1_if_nothing_moved(model_path):
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    policy = load_policy(model_path)
    optimizer = make_optimizer(policy, learning_rate=1e-12)
    sketch = GradientSketch(optimizer.parameters.values())
    results = [run_step(policy, optimizer, pack(groups), sketch=sketch) for _ in range(2)]
    assert "optimizer/grad_cosine" not in results[0].values
    assert results[1].values["optimizer/grad_cosine"] == pytest.approx(1.0, abs=1e-5)
