"""A KL term inside a real step: its gradient rollout by rollout, and who is pulled by it."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import RunConfig
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.learner.objective import Objective
from asyncrl.learner.reference import load_reference
from tests.models import make_tiny_model
from tests.reference.groups import group, random_groups, rollout
from tests.reference.stepping import (
    assert_near,
    gradient_after_first_step,
    load_policy,
    make_optimizer,
    pack,
    plain_logprobs,
    run_step,
)

BETA = 0.7


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The trained model and another one as its reference."""
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "policy", seed=1), make_tiny_model(folder / "other", seed=2)


def reference_of(path, kind="loss_k2"):
    config = RunConfig.model_validate(
        {
            "model": {"path": str(path)},
            "task": {"kind": "repeat_letter"},
            "algorithm": {"kl": {"kind": kind}},
        }
    )
    return load_reference(
        config, device=torch.device("cpu"), compute_dtype=torch.float32, mesh=None
    )


def objective(kind, coefficient=BETA, correction="token_tis"):
    tree = {
        "kl": {"kind": kind, "coefficient": coefficient},
        "correction": {"kind": correction},
    }
    return Objective.of(AlgorithmConfig.model_validate(tree))


def written_out(paths, groups):
    """-1/N sum w A grad log pi + b/N sum min(10, pi/mu) u grad log pi, one rollout at a time."""
    policy, other = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in paths)
    num_tokens = sum(item.num_completion_tokens for item in groups)
    for item in groups:
        scores = np.array([r.verdict.score for r in item.rollouts])
        advantages = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-4)
        for one, advantage in zip(item.rollouts, advantages, strict=True):
            logprobs = plain_logprobs(policy, item.prompt_tokens, one.completion_tokens)
            with torch.no_grad():
                reference = plain_logprobs(other, item.prompt_tokens, one.completion_tokens)
            ratio = (logprobs.detach() - torch.from_numpy(one.behaviour_logprobs)).exp()
            pull = BETA * ratio.clamp(max=10) * (logprobs.detach() - reference)
            slope = pull - ratio.clamp(max=2) * float(advantage)
            ((slope * logprobs).sum() / num_tokens).backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("kind", ["loss_k2", "loss_k3"])
@pytest.mark.parametrize("limit", [40, 4096])
def test_the_gradient_is_that_of_the_policy_loss_plus_the_kl_however_it_is_cut(paths, kind, limit):
    groups = random_groups(np.random.default_rng(3), num_groups=3, group_size=3, vocab=90)
    expected = written_out(paths, groups)
    policy, reference = load_policy(paths[0]), reference_of(paths[1])
    before = [p.clone() for p in reference.parameters()]
    optimizer = make_optimizer(policy)
    step = pack(groups, micro_batch_tokens=limit)
    result = run_step(policy, optimizer, step, objective=objective(kind), reference=reference)
    found = gradient_after_first_step(optimizer)
    for name, wanted in expected.items():
        assert_near(found[name], wanted, tolerance=2e-5)
    assert result.sums["kl/k3"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, reference.parameters(), strict=True))
    assert all(p.grad is None for p in reference.parameters())


@pytest.mark.parametrize("kind", ["reward_k1", "loss_k2", "loss_k3"])
def test_at_the_start_the_policy_is_its_reference_and_nothing_pulls(paths, kind):
    # F011: KL below 1e-4, and the update is that without a KL term.
    groups = random_groups(np.random.default_rng(3), num_groups=2, group_size=3, vocab=90)
    policy, reference = load_policy(paths[0]), reference_of(paths[0])
    optimizer = make_optimizer(policy)
    result = run_step(
        policy, optimizer, pack(groups), objective=objective(kind), reference=reference
    )
    assert result.sums["kl/k3"] / result.num_measured < 1e-6
    plain = load_policy(paths[0])
    other = make_optimizer(plain)
    run_step(plain, other, pack(groups))
    found = gradient_after_first_step(optimizer)
    for name, wanted in gradient_after_first_step(other).items():
        assert_near(found[name], wanted, tolerance=1e-4)


def equal_scores():
    members = [rollout([5, 6], score=1.0), rollout([7], score=1.0)]
    return [group([9], members)]


@pytest.mark.parametrize("kind", ["reward_k1", "loss_k2"])
def test_groups_without_signal_are_pulled_to_the_reference_and_count_in_n(paths, kind):
    # F004: with a KL term they have a gradient, and the step is no idle one.
    policy = load_policy(paths[0])
    step = pack(equal_scores())
    result = run_step(
        policy,
        make_optimizer(policy),
        step,
        objective=objective(kind),
        reference=reference_of(paths[1]),
    )
    assert not result.skipped
    assert result.num_measured == step.num_tokens == 3
    assert result.values["optimizer/grad_norm"] > 0
    without = run_step(load_policy(paths[0]), make_optimizer(policy), step)
    assert without.skipped == "no signal"


def test_rejected_completions_are_pulled_by_the_loss_terms_alone(paths):
    members = [rollout([5], score=s, logprobs=[-60.0]) for s in (0.0, 1.0)]
    step = pack([group([1], members)])
    for kind, skipped in (("loss_k2", ""), ("loss_k3", ""), ("reward_k1", "all rejected")):
        policy = load_policy(paths[0])
        result = run_step(
            policy,
            make_optimizer(policy),
            step,
            objective=objective(kind, correction="veto"),
            reference=reference_of(paths[1]),
        )
        assert result.skipped == skipped


def test_without_a_kl_term_no_second_model_is_loaded(paths):
    assert reference_of(paths[0], kind="none") is None
