"""The optimizer step on a real (tiny) model, against gradients written out rollout by rollout."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.telemetry.trace import Tracer
from tests.models import make_tiny_model
from tests.reference.groups import group, random_groups, rollout, unequal_groups
from tests.reference.stepping import (
    assert_near,
    everything,
    gradient_after_first_step,
    identical,
    load_policy,
    make_optimizer,
    micro_batches,
    pack,
    plain_logprobs,
    replace_micro_batches,
    run_step,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def reference_gradient(path, groups, temperature=1.0):
    """-1/N sum_t min(2, pi/mu) A_t grad log pi_t, one rollout at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    num_tokens = sum(item.num_completion_tokens for item in groups)
    for item in groups:
        scores = np.array([r.verdict.score for r in item.rollouts])
        if np.ptp(scores) == 0:
            continue
        advantages = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-4)
        for one, advantage in zip(item.rollouts, advantages, strict=True):
            logprobs = plain_logprobs(model, item.prompt_tokens, one.completion_tokens, temperature)
            mu = torch.from_numpy(one.behaviour_logprobs)
            weight = (logprobs.detach() - mu).exp().clamp(max=2.0)
            (-(weight * float(advantage) * logprobs).sum() / num_tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def expected_gradient(model_path):
    return reference_gradient(model_path, unequal_groups())


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("limit", [210, 512, 4096])
@pytest.mark.parametrize("skip", [True, False])
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(
    model_path, expected_gradient, share, limit, skip
):
    # F001.
    policy = load_policy(model_path)
    optimizer = make_optimizer(policy)
    step = pack(
        unequal_groups(),
        version=3,
        max_staleness=1,
        share_prompts=share,
        micro_batch_tokens=limit,
        skip_zero_advantage=skip,
    )
    assert not run_step(policy, optimizer, step).skipped
    found = gradient_after_first_step(optimizer)
    assert found.keys() == expected_gradient.keys()
    for name, wanted in expected_gradient.items():
        assert_near(found[name], wanted)


def test_mismatch_is_the_learners_minus_the_stored_logprob_token_by_token(model_path):
    # F002: stored under older versions by another policy; nothing may replace the stored values.
    groups = random_groups(
        np.random.default_rng(9), num_groups=3, group_size=4, vocab=90, version=3, max_staleness=2
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    differences = {0: [], 1: [], 2: []}
    with torch.no_grad():
        for item in groups:
            for one in item.rollouts:
                logprobs = plain_logprobs(model, item.prompt_tokens, one.completion_tokens)
                y = logprobs.double() - torch.from_numpy(one.behaviour_logprobs).double()
                for value, version in zip(y.tolist(), one.token_versions.tolist(), strict=True):
                    differences[3 - version].append(value)
    policy = load_policy(model_path)
    values = run_step(
        policy, make_optimizer(policy), pack(groups, version=3, max_staleness=2)
    ).values
    for d, y in differences.items():
        assert values[f"mismatch/tokens@{d}"] == len(y)
        assert values[f"mismatch/k1@{d}"] == pytest.approx(-np.mean(y), rel=1e-4)
        assert values[f"mismatch/abs@{d}"] == pytest.approx(np.mean(np.abs(y)), rel=1e-4)
        k3 = np.mean(np.exp(y) - 1 - np.array(y))
        assert values[f"mismatch/k3@{d}"] == pytest.approx(k3, rel=1e-3)
    everything = [value for y in differences.values() for value in y]
    assert values["mismatch/max"] == pytest.approx(np.abs(everything).max(), rel=1e-4)
    assert values["mismatch/abs"] > 0.1


def test_sums_describe_the_loss_and_entropy_is_that_of_the_model(model_path):
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    policy = load_policy(model_path)
    step = pack(groups)
    result = run_step(policy, make_optimizer(policy), step)
    assert result.num_measured == step.num_tokens
    # One update per batch: the ratio is 1, so nothing is ever clipped.
    assert result.sums["ratio/clipped_high"] == result.sums["ratio/clipped_low"] == 0
    assert 0 < result.values["policy/entropy"] < math.log(110)
    assert 0 < result.sums["correction/weight"] <= 2.0 * step.num_tokens


def test_a_gradient_that_is_not_finite_changes_no_bit(model_path):
    # F015: one clean step, one poisoned, one clean; the poisoned one might not have been.
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    clean = pack(groups)
    (micro,) = micro_batches(clean)
    micro_advantages = micro.advantages.copy()
    micro_advantages[0] = np.nan
    poisoned = replace_micro_batches(clean, [replace(micro, advantages=micro_advantages)])
    policy, control = load_policy(model_path), load_policy(model_path)
    optimizer, control_optimizer = make_optimizer(policy), make_optimizer(control)
    run_step(policy, optimizer, clean)
    before = everything(policy, optimizer)
    result = run_step(policy, optimizer, poisoned)
    assert result.skipped == "not finite"
    assert result.values["optimizer/skipped"] == 1.0
    assert all(map(math.isfinite, [*result.sums.values(), *result.values.values()]))
    assert identical(everything(policy, optimizer), before)
    assert not run_step(policy, optimizer, clean).skipped
    run_step(control, control_optimizer, clean)
    run_step(control, control_optimizer, clean)
    assert identical(everything(policy, optimizer), everything(control, control_optimizer))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_stored_logprob_that_is_not_finite_costs_only_its_token(model_path, bad):
    def groups(value):
        members = [
            rollout([5, 6, 7], score=1.0, logprobs=[-1.0, value, -1.0]),
            rollout([8], score=0.0, logprobs=[-2.0]),
        ]
        return [group([9], members)]

    policy = load_policy(model_path)
    optimizer = make_optimizer(policy)
    result = run_step(policy, optimizer, pack(groups(bad)))
    assert not result.skipped
    assert result.sums["mismatch/nonfinite"] == 1
    assert result.values["mismatch/tokens"] == 3
    # F020: the other tokens' gradient, N and baseline are what they were. Two scores of 1 and 0 have
    # the advantages +-0.5 / (sqrt(0.5) + 1e-4); N = 4.
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    [item] = groups(-1.0)
    for one, sign in zip(item.rollouts, (1, -1), strict=True):
        logprobs = plain_logprobs(model, item.prompt_tokens, one.completion_tokens)
        weight = (logprobs.detach() - torch.from_numpy(one.behaviour_logprobs)).exp().clamp(max=2.0)
        terms = weight * logprobs * sign * 0.5 / (math.sqrt(0.5) + 1e-4)
        kept = [t for t in range(len(terms)) if (sign, t) != (1, 1)]
        (-terms[kept].sum() / 4).backward()
    found = gradient_after_first_step(optimizer)
    for name, parameter in model.named_parameters():
        assert_near(found[name], parameter.grad)


def test_steps_without_tokens_or_signal_are_skipped_with_the_reason(model_path):
    # F016.
    policy = load_policy(model_path)
    optimizer = make_optimizer(policy, weight_decay=0.1)
    members = [rollout([5], score=0.0), rollout([6], score=1.0)]
    run_step(policy, optimizer, pack([group([1], members)]))
    before = everything(policy, optimizer)
    unscored = [group([1], [rollout([2], status="error"), rollout([3], status="timeout")])]
    equal = [group([1], [rollout([2], score=1.0), rollout([3], score=1.0)])]
    for groups, reason in ((unscored, "no tokens"), (equal, "no signal")):
        for skip in (True, False):
            step = pack(groups, skip_zero_advantage=skip)
            result = run_step(policy, optimizer, step)
            assert result.skipped == reason
            assert result.sums == {}
            assert identical(everything(policy, optimizer), before)


def test_the_gradient_is_scaled_down_to_the_longest_allowed(model_path):
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    policy = load_policy(model_path)
    optimizer = make_optimizer(policy, max_grad_norm=0.01)
    result = run_step(policy, optimizer, pack(groups))
    gradient = gradient_after_first_step(optimizer)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
    assert result.values["optimizer/grad_norm"] > 0.1
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_the_learning_rate_is_a_function_of_the_version_alone(model_path):
    # F079: a run resumed at 37 continues where it was.
    optimizer = make_optimizer(load_policy(model_path), learning_rate=4e-3, num_warmup_steps=4)
    rates = [optimizer.learning_rate(version) for version in range(6)]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3, 4e-3])
    constant = make_optimizer(load_policy(model_path), learning_rate=4e-3)
    assert [constant.learning_rate(v) for v in (0, 37)] == [4e-3, 4e-3]


def test_spans_are_recorded(model_path):
    groups = random_groups(np.random.default_rng(2), num_groups=1, group_size=3, vocab=90)
    policy = load_policy(model_path)
    tracer = Tracer(None, process="test")
    run_step(policy, make_optimizer(policy), pack(groups), tracer=tracer)
    named = {"learner/forward", "learner/backward", "learner/optimizer"}
    assert tracer.totals().keys() == named | {"test/other"}  # what no span was open for
