"""Losses, aggregations and proximal policies on a real (tiny) model, against plain forward passes."""

import copy
import math

import numpy as np
import pytest
import torch

from asyncrl.config.algorithm import LOSS_KINDS
from asyncrl.learner.objective import Objective
from asyncrl.telemetry.metrics import resolve
from tests.models import make_tiny_model
from tests.reference.full_gradient import full_gradient, plain_model
from tests.reference.groups import group, random_groups, rollout, unequal_groups
from tests.reference.stepping import (
    BETA1,
    aggregation,
    algorithm,
    assert_near,
    everything,
    gradient_after_first_step,
    identical,
    load_policy,
    make_optimizer,
    micro_batches,
    pack,
    run_step,
)

PPO = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
GSPO = {"clip_low": 0.3, "clip_high": 0.9, "token_level": False}
AROUND_MU = ("behaviour_clipped", "dppo", "topr", "m2po", "squared_log_ratio")
CASES = {
    "clipped sequence_mean": ("clipped", PPO, "sequence_mean", "current"),
    "reinforce constant_length": ("reinforce", {}, "constant_length", "current"),
    "clipped prompt_mean": ("clipped", PPO, "prompt_mean", "interpolated"),
    "gspo sequence_mean": ("gspo", GSPO, "sequence_mean", "interpolated"),
    "topr token_mean": ("topr", {"cap": 1.0}, "token_mean", "current"),
    "m2po token_mean": ("m2po", {"budget": 2.0}, "token_mean", "current"),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def objective_of(kind, settings, proximal="current", **changes):
    weight = "none" if kind in AROUND_MU else "token"
    return Objective.of(
        algorithm(kind, loss=settings, correction=weight, proximal=proximal, **changes)
    )


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_the_reference_however_the_step_is_cut(model_path, case):
    # F001 for a token, a sequence and a constant aggregation, and for losses of whole completions.
    kind, settings, name, proximal = CASES[case]
    cap = None if kind in AROUND_MU else 2.0
    wanted = full_gradient(
        plain_model(model_path), unequal_groups(), kind=kind, settings=settings, aggregation=name,
        version=3, proximal=proximal, tis_cap=cap,
    )  # fmt: skip
    cuts = set()
    for share, limit in [(True, 4096), (True, 512), (True, 210), (False, 512), (False, 210)]:
        step = pack(
            unequal_groups(), version=3, max_staleness=1, share_prompts=share,
            micro_batch_tokens=limit, aggregation=aggregation(name),
        )  # fmt: skip
        policy = load_policy(model_path)
        optimizer = make_optimizer(policy)
        run_step(policy, optimizer, step, objective=objective_of(kind, settings, proximal))
        found = gradient_after_first_step(optimizer)
        cuts.add(len(micro_batches(step)))
        assert any(float(value.abs().max()) > 1e-3 for value in wanted.values())
        for parameter, value in wanted.items():
            assert_near(found[parameter], value)
    assert len(cuts) >= 3


def stale_groups(seed=4, num_groups=4):
    return random_groups(
        np.random.default_rng(seed), num_groups=num_groups, group_size=3, vocab=90, version=5,
        max_staleness=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings"), [("clipped", PPO), ("gspo", GSPO | {"clip_low": 0.05, "clip_high": 0.05})]
)
def test_later_updates_are_clipped_around_the_policy_at_the_start_of_the_step(
    model_path, kind, settings
):
    groups, rate = stale_groups(), 0.02
    policy = load_policy(model_path)
    optimizer = make_optimizer(policy, learning_rate=rate)
    step = pack(groups, version=5, max_staleness=2, num_minibatches=2)
    objective = objective_of(kind, settings, "auto", num_minibatches=2)
    assert objective.proximal == "recomputed"
    result = run_step(policy, optimizer, step, objective=objective)
    assert (result.skipped, result.values["optimizer/updates"]) == ("", 2)
    assert result.sums["ratio/clipped_high"] + result.sums["ratio/clipped_low"] > 0

    # By hand: two updates of a plain AdamW, pi_prox from a copy that stays behind.
    model, start = plain_model(model_path), plain_model(model_path)
    adam = torch.optim.AdamW(model.parameters(), lr=rate, betas=(BETA1, 0.999), weight_decay=0.0)
    for part in (groups[:2], groups[2:]):
        gradient = full_gradient(
            model, part, kind=kind, settings=settings, version=5, proximal=start
        )
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[name]
        adam.step()
    for name, parameter in model.named_parameters():
        found = optimizer.adam.state[optimizer.parameters[name]]
        assert found["step"] == 2
        assert_near(found["exp_avg"], adam.state[parameter]["exp_avg"], tolerance=1e-3)


def test_one_update_around_a_recomputed_policy_is_the_update_around_this_pass(model_path):
    step = pack(stale_groups(), version=5, max_staleness=2)
    states = []
    for proximal in ("current", "recomputed"):
        policy = load_policy(model_path)
        optimizer = make_optimizer(policy)
        run_step(policy, optimizer, step, objective=objective_of("clipped", PPO, proximal))
        states.append(everything(policy, optimizer))
    assert identical(*states)


def test_each_minibatch_is_an_update_as_if_it_were_alone(model_path):
    # With this pass as pi_prox the second update depends on the first through the weights alone.
    groups = stale_groups(num_groups=5)
    objective = objective_of("reinforce", {})
    together, apart = load_policy(model_path), load_policy(model_path)
    left, right = make_optimizer(together), make_optimizer(apart)
    settings = {"version": 5, "max_staleness": 2, "aggregation": aggregation("sequence_mean")}
    run_step(together, left, pack(groups, num_minibatches=2, **settings), objective=objective)
    for part in (groups[:3], groups[3:]):
        run_step(apart, right, pack(part, **settings), objective=objective)
    assert identical(everything(together, left), everything(apart, right))


def test_a_minibatch_without_signal_or_not_finite_leaves_the_others_their_update(model_path):
    # F015.
    constant = group([3], [rollout([5, 6], score=1.0), rollout([7], score=1.0)])
    broken = group([3], [rollout([5, 6], score=1.0), rollout([7], score=0.0)])
    good = group([3], [rollout([8, 9], score=0.0), rollout([7, 2], score=1.0)])
    step = pack([constant, broken, good], version=5, max_staleness=5, num_minibatches=3)
    micro_batches(step)[1].advantages[0] = math.nan
    policy = load_policy(model_path)
    optimizer = make_optimizer(policy)
    objective = objective_of("clipped", PPO, "auto", num_minibatches=3)
    result = run_step(policy, optimizer, step, objective=objective)
    assert (result.skipped, result.num_nonfinite, result.values["optimizer/updates"]) == ("", 1, 1)
    alone = load_policy(model_path)
    control = make_optimizer(alone)
    run_step(alone, control, pack([good], version=5, max_staleness=5), objective=objective)
    assert identical(everything(policy, optimizer), everything(alone, control))


def test_mismatch_is_measured_against_a_computed_policy_not_an_interpolated_one(model_path):
    step = pack(stale_groups(), version=5, max_staleness=2)
    values = []
    for proximal in ("current", "interpolated"):
        policy = load_policy(model_path)
        objective = objective_of("clipped", PPO, proximal)
        values.append(run_step(policy, make_optimizer(policy), step, objective=objective).values)
    for name in ("mismatch/abs@0", "mismatch/k1@2", "mismatch/ess", "mismatch/max"):
        assert values[0][name] == values[1][name] != 0


@pytest.mark.parametrize("limit", [256, 4])
def test_the_entropy_bonus_raises_the_entropy_of_every_token(model_path, limit):
    # -A/N log pi - c/N H, over the tokens of a group without advantage as well.
    groups = [
        group([3, 4], [rollout([5, 6], score=1.0), rollout([7], score=0.0)]),
        group([8], [rollout([9, 10, 11], score=1.0), rollout([12], score=1.0)]),
    ]
    bonus, num_tokens = 0.3, 7
    model = plain_model(model_path)
    wanted = full_gradient(model, groups, kind="reinforce", settings={}, tis_cap=2.0)
    model.zero_grad()
    for item in groups:
        for one in item.rollouts:
            sequence = torch.tensor([*item.prompt_tokens.tolist(), *one.completion_tokens.tolist()])
            table = model(input_ids=sequence[None]).logits[0].log_softmax(-1)
            table = table[len(item.prompt_tokens) - 1 : -1]
            (bonus / num_tokens * (table.exp() * table).sum()).backward()
    policy = load_policy(model_path)
    optimizer = make_optimizer(policy)
    objective = objective_of("reinforce", {}, entropy_bonus=bonus)
    assert objective.every_token_pulls
    step = pack(groups, micro_batch_tokens=limit)
    run_step(policy, optimizer, step, objective=objective)
    found = gradient_after_first_step(optimizer)
    for name, parameter in model.named_parameters():
        assert_near(found[name], wanted[name] + parameter.grad)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_every_metric_of_every_loss_is_declared(model_path, kind):
    weight = "none" if kind in AROUND_MU else "token"
    policy = load_policy(model_path)
    result = run_step(
        policy, make_optimizer(policy), pack(stale_groups(), version=5, max_staleness=2),
        objective=Objective.of(algorithm(kind, correction=weight)),
    )  # fmt: skip
    counts = result.counts | {"token": result.num_measured}
    resolved = resolve(result.sums | result.values, counts)
    assert resolved["loss/policy"] == pytest.approx(
        result.sums["loss/policy"] / result.num_measured
    )


def test_what_pulls_every_token_trains_a_step_without_advantages(model_path):
    equal = [group([3], [rollout([5, 6], score=1.0), rollout([7], score=1.0)])]
    for objective, reason in [
        (objective_of("clipped", PPO), "no signal"),
        (objective_of("clipped", PPO, entropy_bonus=0.1), ""),
        (objective_of("squared_log_ratio", {"beta": 0.1}), ""),
    ]:
        policy = load_policy(model_path)
        before = copy.deepcopy(policy.state_dict())
        result = run_step(policy, make_optimizer(policy), pack(equal), objective=objective)
        assert result.skipped == reason
        after = policy.state_dict()
        assert all(torch.equal(before[n], after[n]) for n in before) == bool(reason)
