"""A step's completions as losses see them: whole, scaled, in updates with counts of their own."""

import numpy as np
import pytest

from asyncrl.algo import AGGREGATIONS
from tests.reference.groups import group, rollout
from tests.reference.stepping import aggregation, micro_batches, pack


def tokens_by_completion(step):
    """(targets, scale) of every trained completion, found by the micro-batches' own index."""
    found = []
    for micro in micro_batches(step):
        assert micro.sequence.dtype == np.int64
        assert sorted(set(micro.sequence.tolist())) == list(range(micro.sequence.max() + 1))
        for index in range(micro.sequence.max() + 1):
            inside = micro.sequence == index
            (scale,) = set(micro.scale[inside].tolist())
            found.append((micro.targets[inside].tolist(), scale))
    return sorted(found)


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("limit", [12, 64])
def test_completions_are_whole_and_scaled_whatever_the_packing(name, share, limit):
    # Lengths 1, 3, 2, 2 in two prompts; a rollout without a score and an empty one count nowhere.
    # N = 8, B = 4, L = 5, P = 2 with 4 tokens each.
    groups = [
        group([9], [rollout([1], score=0.0), rollout([2, 2, 2], score=1.0)]),
        group([8, 8, 8], [rollout([3] * 7, status="error"), rollout([3] * 7, status="error")]),
        group(
            [9] * 6,
            [
                rollout([4, 4], score=0.0),
                rollout([5, 5], score=1.0),
                rollout([], score=2.0, finish="abort"),
            ],
        ),
    ]
    scales = {
        "token_mean": [1, 1, 1, 1],
        "sequence_mean": [8 / 4, 8 / 12, 8 / 8, 8 / 8],
        "constant_length": [8 / 20] * 4,
        "prompt_mean": [8 / 8] * 4,
    }[name]
    step = pack(
        groups,
        aggregation=aggregation(name, 5),
        share_prompts=share,
        micro_batch_tokens=limit,
    )
    assert tokens_by_completion(step) == [
        (targets, pytest.approx(scale))
        for targets, scale in zip([[1], [2, 2, 2], [4, 4], [5, 5]], scales, strict=True)
    ]


def test_a_longer_neighbour_changes_no_constant_length_scale():
    # F008: L is the config's number, so a token's weight scale / N depends on B alone.
    def weight(*lengths):
        members = [rollout([7] * n, score=float(i % 2)) for i, n in enumerate(lengths)]
        step = pack([group([1], members)], aggregation=aggregation("constant_length", 20))
        (micro,) = micro_batches(step)
        return float(micro.scale[0]) / step.num_tokens

    assert weight(2, 2) == pytest.approx(1 / (2 * 20))
    assert weight(2, 40) == pytest.approx(1 / (2 * 20))


def pair(prompt, length, **settings):
    members = [rollout([prompt] * length, score=float(i), **settings) for i in range(2)]
    return group([prompt], members, group_id=prompt)


@pytest.mark.parametrize(
    ("num_groups", "parts", "sizes"),
    [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (5, 3, [2, 2, 1]), (3, 3, [1, 1, 1])],
)
def test_minibatches_are_consecutive_groups_with_counts_of_their_own(num_groups, parts, sizes):
    groups = [pair(index + 1, length=index + 1) for index in range(num_groups)]
    step = pack(groups, num_minibatches=parts, aggregation=aggregation("sequence_mean"))
    assert [len(m.micro_batches) for m in step.minibatches] == [1] * parts
    start = 0
    for minibatch, size in zip(step.minibatches, sizes, strict=True):
        inside = groups[start : start + size]
        alone = pack(inside, aggregation=aggregation("sequence_mean"))
        (wanted,), (found,) = micro_batches(alone), minibatch.micro_batches
        assert minibatch.num_tokens == alone.num_tokens
        assert found.targets.tolist() == wanted.targets.tolist()
        assert found.scale.tolist() == wanted.scale.tolist()
        start += size
    assert step.num_tokens == sum(item.num_completion_tokens for item in groups)
    assert step.sums["tokens/trained"] == step.num_tokens
