"""Packing: which tokens train, what predicts them, how old they are, and that nothing is lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo import ADVANTAGES
from asyncrl.errors import ConfigError, StaleRolloutError
from asyncrl.learner.batch import build_step, split_for_ranks
from tests.reference.groups import group, random_groups, rollout
from tests.reference.stepping import aggregation, micro_batches


def build(groups, **changes):
    arguments = {
        "version": 0,
        "max_staleness": 0,
        "advantage": ADVANTAGES["mean"],
        "aggregation": aggregation("token_mean"),
        "num_minibatches": 1,
        "mask_truncated": False,
        "share_prompts": True,
        "micro_batch_tokens": 64,
        "skip_zero_advantage": False,
    }
    return build_step(groups, **(arguments | changes))


def trained_tokens(step):
    """Every trained token as (context it is predicted from, target, mu, advantage, staleness)."""
    found = []
    for micro in micro_batches(step):
        width = micro.tokens.shape[1]
        for index, flat in enumerate(micro.predictor_index):
            if not micro.completion_mask[index]:
                continue
            row, column = divmod(int(flat), width)
            segment = micro.segments[row, column]
            # Visible: at or before the predictor, in the prompt or in the predictor's completion.
            seen = [c for c in range(column + 1) if micro.segments[row, c] in (0, segment)]
            assert micro.position_ids[row, seen].tolist() == list(range(len(seen)))
            found.append(
                (
                    tuple(micro.tokens[row, seen].tolist()),
                    int(micro.targets[index]),
                    float(micro.behaviour_logprobs[index]),
                    float(micro.advantages[index]),
                    int(micro.staleness[index]),
                )
            )
    return sorted(found)


def expected_tokens(groups, version):
    """The same from the definition: rewards minus their mean, prefixes of the token lists."""
    found = []
    for item in groups:
        scores = [r.verdict.score for r in item.rollouts]
        for one, score in zip(item.rollouts, scores, strict=True):
            advantage = np.float32(score - np.mean(scores)) if len(set(scores)) > 1 else 0.0
            for t, target in enumerate(one.completion_tokens.tolist()):
                context = item.prompt_tokens.tolist() + one.completion_tokens[:t].tolist()
                staleness = version - int(one.token_versions[t])
                mu = float(one.behaviour_logprobs[t])
                found.append((tuple(context), target, mu, float(advantage), staleness))
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_groups=st.integers(1, 4),
    group_size=st.integers(2, 5),
    share=st.booleans(),
    limit=st.integers(26, 120),
    world=st.integers(1, 4),
)
def test_every_token_is_trained_once_from_its_own_context(
    seed, num_groups, group_size, share, limit, world
):
    groups = random_groups(
        np.random.default_rng(seed),
        num_groups=num_groups,
        group_size=group_size,
        vocab=50,
        version=7,
        max_staleness=3,
    )
    step = build(groups, version=7, max_staleness=3, share_prompts=share, micro_batch_tokens=limit)
    parts = [split_for_ranks(step, rank, world) for rank in range(world)]
    found = sorted(token for part in parts for token in trained_tokens(part))
    assert found == expected_tokens(groups, 7)
    assert step.num_tokens == len(found)
    # F077: equal counts, and N of the whole step on every rank.
    assert len({len(micro_batches(part)) for part in parts}) == 1
    assert {part.num_tokens for part in parts} == {step.num_tokens}
    assert all(micro.tokens.size <= limit for micro in micro_batches(step))


def test_a_shared_row_is_laid_out_as_documented():
    step = build([group([11, 12, 13], [rollout([1, 2, 3], score=0.0), rollout([4, 5], score=1.0)])])
    (micro,) = micro_batches(step)
    assert micro.tokens.tolist() == [[11, 12, 13, 1, 2, 4]]
    assert micro.segments.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert micro.targets.tolist() == [1, 2, 3, 4, 5]
    assert micro.predictor_index.tolist() == [2, 3, 4, 2, 5]
    assert micro.advantages.tolist() == [-0.5, -0.5, -0.5, 0.5, 0.5]
    assert not micro.is_causal


def test_without_sharing_rows_are_causal_and_padded_to_the_longest():
    step = build(
        [group([11, 12], [rollout([1, 2, 3], score=0.0), rollout([4], score=1.0)])],
        share_prompts=False,
    )
    (micro,) = micro_batches(step)
    assert micro.tokens.tolist() == [[11, 12, 1, 2], [11, 12, 0, 0]]
    assert micro.segments.tolist() == [[0, 0, 1, 1], [0, 0, -1, -1]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert micro.predictor_index.tolist() == [1, 2, 3, 5]
    assert micro.is_causal


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("trains", [True, False])
def test_a_token_one_version_too_old_raises_and_the_oldest_allowed_does_not(k, trains):
    # F028: no member may be too old, or the run ends.
    status = "scored" if trains else "error"

    def of(version):
        return [
            group(
                [1],
                [
                    rollout([2, 3], score=0.0, versions=[10, 10]),
                    rollout([2, 3, 4], status=status, versions=[version, 10, 10]),
                ],
                group_id=77,
            )
        ]

    step = build(of(10 - k), version=10, max_staleness=k)
    if trains:
        assert step.sums["staleness/max"] == k
    with pytest.raises(StaleRolloutError, match=rf"group 77, rollout 1, token 0.*{9 - k}.*={k}\)"):
        build(of(10 - k - 1), version=10, max_staleness=k)


def test_a_token_from_the_future_raises():
    future = [group([1], [rollout([2], versions=[4]), rollout([2], versions=[5])])]
    with pytest.raises(StaleRolloutError, match="version 5; training version 4"):
        build(future, version=4, max_staleness=2)


def test_staleness_is_that_of_each_token_at_the_step_that_trains_it():
    # F021: versions 3, 4, 6 trained at version 7 are 4, 3, 1 old; 10 tokens each, sum 80.
    old = rollout([5] * 30, score=1.0, versions=[3] * 10 + [4] * 10 + [6] * 10)
    step = build(
        [group([1], [old, rollout([5], score=0.0, versions=[7])])], version=7, max_staleness=4
    )
    assert step.sums["staleness/mean"] == 80
    assert [step.sums[f"staleness/tokens@{d}"] for d in range(5)] == [1, 10, 0, 10, 10]


def test_unscored_and_aborted_rollouts_train_no_token_and_shape_no_baseline():
    # F010.
    kept = [rollout([1, 2], score=0.0), rollout([3], score=1.0)]
    odd = [
        rollout([4] * 5, status="timeout"),
        rollout([4] * 5, status="abstained"),
        rollout([4] * 5, score=9.0, finish="abort"),
        rollout([], score=9.0, finish="abort"),
    ]
    alone, mixed = build([group([9], kept)]), build([group([9], [*odd, *kept])])
    assert trained_tokens(mixed) == trained_tokens(alone)
    assert mixed.num_tokens == alone.num_tokens == 3


def test_zero_advantage_rows_may_be_left_out_but_stay_in_n():
    # F004.
    constant = group([1, 2], [rollout([3, 4], score=1.0), rollout([5, 6], score=1.0)])
    varied = group([1, 2], [rollout([3], score=0.0), rollout([5], score=1.0)])
    step = build([constant, varied], skip_zero_advantage=True)
    assert step.num_tokens == 6
    assert sorted(target for _, target, *_ in trained_tokens(step)) == [3, 5]
    assert step.sums["groups/frac_teaching"] == 1
    nothing = build([constant], skip_zero_advantage=True)
    assert (nothing.num_tokens, micro_batches(nothing)) == (4, [])
    assert not nothing.minibatches[0].has_signal


def test_a_rollout_longer_than_a_micro_batch_names_the_setting():
    long = [group([1] * 10, [rollout([2] * 8, score=0.0), rollout([2], score=1.0)])]
    # 10 prompt tokens and 7 inputs: the last completion token is not read.
    build(long, micro_batch_tokens=17)
    with pytest.raises(ConfigError, match=r"learner\.micro_batch_tokens=16"):
        build(long, micro_batch_tokens=16)


def test_a_rounding_above_zero_is_zero_and_nan_stays_to_be_counted():
    members = [rollout([2, 3], score=0.0, logprobs=[5e-4, np.nan]), rollout([2], score=1.0)]
    (micro,) = micro_batches(build([group([1], members)]))
    assert micro.behaviour_logprobs[0] == 0.0
    assert np.isnan(micro.behaviour_logprobs[1])


def test_truncated_completions_train_only_if_told_but_shape_the_baseline():
    # F010. Scores 0, 1, 2 with mean 1: without the truncated one the others would be -0.5 and +0.5.
    members = [
        rollout([2, 2], score=0.0),
        rollout([3], score=1.0),
        rollout([4] * 9, score=2.0, finish="length"),
    ]
    every, masked = (build([group([1], members)], mask_truncated=flag) for flag in (False, True))
    assert [(t, a) for _, t, _, a, _ in trained_tokens(every)][:3] == [(2, -1), (3, 0), (4, 1)]
    assert [(t, a) for _, t, _, a, _ in trained_tokens(masked)] == [(2, -1), (3, 0), (2, -1)]
    assert (every.num_tokens, masked.num_tokens) == (12, 3)
    assert masked.counts["rollout"] == every.counts["rollout"] == 3
    only = [group([1], [rollout([2], score=float(i), finish="length") for i in range(2)])]
    nothing = build(only, mask_truncated=True)
    assert (nothing.num_tokens, nothing.minibatches[0].has_signal) == (0, False)


def test_an_empty_step_has_nothing_to_train():
    step = build([group([1], [rollout([2], status="error"), rollout([3], status="error")])])
    assert (step.num_tokens, micro_batches(step)) == (0, [])
    assert not step.minibatches[0].has_signal
    assert micro_batches(split_for_ranks(step, 1, 2)) == []
