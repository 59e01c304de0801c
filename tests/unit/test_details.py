"""Tokens that are recorded one by one: every number belongs to its token, whoever computed it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.learner.batch import split_for_ranks
from asyncrl.learner.details import MEASURED, PROXIMAL, WEIGHT
from asyncrl.learner.records import fate, token_columns
from tests.models import make_tiny_model
from tests.reference.groups import group, random_groups, rollout
from tests.reference.stepping import load_policy, make_optimizer, pack, plain_logprobs, run_step


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def some_groups(num_groups=5):
    return random_groups(
        np.random.default_rng(3), num_groups=num_groups, group_size=3, vocab=90, version=2,
        max_staleness=2,
    )  # fmt: skip


def packed(groups, **changes):
    arguments = {"version": 2, "max_staleness": 2, "micro_batch_tokens": 40}
    return pack(groups, **(arguments | changes))


@pytest.mark.parametrize(
    ("num_minibatches", "micro_batch_tokens", "num_groups"),
    [(1, 40, 4), (2, 40, 4), (1, 800, 1), (1, 800, 2), (1, 800, 4)],
)
def test_each_recorded_token_has_the_log_prob_and_weight_of_that_very_token(
    model_path, num_minibatches, micro_batch_tokens, num_groups
):
    groups = some_groups()
    step = packed(
        groups, num_detailed_groups=num_groups, num_minibatches=num_minibatches,
        micro_batch_tokens=micro_batch_tokens,
    )  # fmt: skip
    policy = load_policy(model_path)
    with torch.no_grad():
        wanted = {
            (g, r): plain_logprobs(policy.model, groups[g].prompt_tokens, member.completion_tokens)
            for g, r in step.details
            for member in [groups[g].rollouts[r]]
        }
    # A rate of 0, so that the second minibatch is under the same weights as the first.
    optimizer = make_optimizer(policy, learning_rate=0.0)
    details = run_step(policy, optimizer, step).details
    cap = AlgorithmConfig().correction.cap
    assert len(wanted) == 3 * num_groups
    for (g, r), place in step.details.items():
        member = groups[g].rollouts[r]
        inside = slice(place, place + len(member.completion_tokens))
        assert details[MEASURED, inside].tolist() == [1.0] * len(member.completion_tokens)
        logprobs = wanted[g, r].numpy()
        assert details[PROXIMAL, inside] == pytest.approx(logprobs, abs=2e-5)
        weights = [
            min(cap, math.exp(p - m))
            for p, m in zip(logprobs, member.behaviour_logprobs, strict=True)
        ]
        assert details[WEIGHT, inside] == pytest.approx(weights, rel=1e-4)


def test_two_ranks_fill_the_places_of_one_and_none_twice(model_path):
    step = packed(some_groups(), num_detailed_groups=5)
    tables = []
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        policy = load_policy(model_path)
        result = run_step(policy, make_optimizer(policy), split_for_ranks(step, rank, world))
        tables.append(result.details)
    whole, first, second = tables
    assert set(whole[MEASURED]) == {1.0}
    assert 0 < first[MEASURED].sum() < step.num_detailed_tokens
    assert np.abs(first + second - whole).max() < 2e-5


def test_groups_that_teach_are_recorded_first_and_what_was_not_computed_is_marked(model_path):
    dull = group([4], [rollout([5, 6], score=1.0), rollout([7], score=1.0)], group_id=0)
    mixed = group([4], [rollout([5, 6], score=0.0), rollout([7], score=1.0)], group_id=1)
    step = pack([dull, mixed], num_detailed_groups=1, skip_zero_advantage=True)
    assert step.details == {(1, 0): 0, (1, 1): 2}
    step = pack([dull, mixed], num_detailed_groups=2, skip_zero_advantage=True)
    assert step.details == {(0, 0): 0, (0, 1): 2, (1, 0): 3, (1, 1): 5}
    policy = load_policy(model_path)
    details = run_step(policy, make_optimizer(policy), step).details
    assert details[MEASURED].tolist() == [0, 0, 0, 1, 1, 1]


def test_nothing_is_recorded_unless_asked_for(model_path):
    policy = load_policy(model_path)
    step = packed(some_groups())
    assert (step.details, step.num_detailed_tokens) == ({}, 0)
    assert run_step(policy, make_optimizer(policy), step).details is None


@given(seed=st.integers(0, 2**32), wanted=st.integers(0, 7), parts=st.integers(1, 3))
@settings(max_examples=40)
def test_places_are_those_of_whole_completions_and_leave_no_gap(seed, wanted, parts):
    groups = random_groups(np.random.default_rng(seed), num_groups=5, group_size=3, vocab=90)
    step = pack(groups, num_detailed_groups=wanted, num_minibatches=parts, micro_batch_tokens=40)
    covered = [
        place + i
        for (g, r), place in step.details.items()
        for i in range(len(groups[g].rollouts[r].completion_tokens))
    ]
    assert sorted(covered) == list(range(step.num_detailed_tokens))
    assert len({g for g, _ in step.details}) == min(wanted, 5)
    packed_places = np.concatenate(
        [micro.detail for minibatch in step.minibatches for micro in minibatch.micro_batches]
    )
    assert sorted(packed_places[packed_places >= 0].tolist()) == sorted(covered)


def test_recording_changes_no_weight(model_path):
    policies = [load_policy(model_path) for _ in range(2)]
    for policy, num_detailed in zip(policies, (0, 5), strict=True):
        run_step(
            policy, make_optimizer(policy), packed(some_groups(), num_detailed_groups=num_detailed)
        )
    first, second = (dict(policy.named_weights()) for policy in policies)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("finish", "status", "advantage", "mask_truncated", "wanted"),
    [
        ("stop", "scored", 0.5, False, "trained"),
        ("stop", "scored", 0.0, False, "zero_advantage"),
        ("length", "scored", 0.5, False, "trained"),
        ("length", "scored", 0.5, True, "truncated"),
        ("stop", "timeout", math.nan, False, "unscored"),
        ("length", "error", math.nan, True, "unscored"),
        ("abort", "scored", 0.5, False, "aborted"),
    ],
)
def test_every_rollout_has_a_fate(finish, status, advantage, mask_truncated, wanted):
    one = rollout([3], finish=finish, status=status)
    assert fate(one, advantage, mask_truncated=mask_truncated) == wanted


def test_numbers_that_are_none_are_null():
    one = rollout([3, 4, 5], logprobs=[-1.0, math.nan, -0.123456])
    measured = np.array([[1.0, 1.0, 0.0], [-1.5, math.nan, 0.0], [1.25, 0.0, 0.0]])
    assert token_columns(one, ["a", "b", "c"], measured) == {
        "text": ["a", "b", "c"],
        "behaviour_logprobs": [-1.0, None, -0.1235],
        "proximal_logprobs": [-1.5, None, None],
        "behaviour_weights": [1.25, 0.0, None],
    }
