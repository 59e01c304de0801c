"""Small rollout groups with every fact chosen by the test."""

import numpy as np

from asyncrl.types import Rollout, RolloutGroup, Verdict, VersionSpan


def rollout(
    tokens,
    *,
    score=1.0,
    versions=None,
    logprobs=None,
    finish="stop",
    status="scored",
) -> Rollout:
    """`versions` is one per token; `score` None with a status other than "scored"."""
    tokens = np.array(tokens, np.int32)
    versions = [0] * len(tokens) if versions is None else list(versions)
    spans = []
    for index, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, index + 1)
        else:
            spans.append(VersionSpan(version, index, index + 1))
    if logprobs is None:
        logprobs = -1.0 - 0.1 * np.arange(len(tokens))
    return Rollout(
        completion_tokens=tokens,
        behaviour_logprobs=np.array(logprobs, np.float32),
        version_spans=tuple(spans),
        finish_reason=finish,
        text="",
        verdict=Verdict(status=status, score=score if status == "scored" else None),
    )


def group(prompt, rollouts, *, group_id=0) -> RolloutGroup:
    return RolloutGroup(
        group_id=group_id,
        ordinal=group_id,
        prompt_tokens=np.array(prompt, np.int32),
        prompt_text="",
        answer="",
        rollouts=tuple(rollouts),
    )


def random_groups(generator, *, num_groups, group_size, vocab, version=0, max_staleness=0):
    """Groups of unequal lengths and scores; versions rise within [version - k, version]."""
    groups = []
    for group_id in range(num_groups):
        prompt = generator.integers(0, vocab, generator.integers(1, 12))
        members = []
        for _ in range(group_size):
            length = int(generator.integers(1, 15))
            oldest = max(0, version - max_staleness)
            members.append(
                rollout(
                    generator.integers(0, vocab, length),
                    score=float(generator.integers(0, 3)),
                    versions=np.sort(generator.integers(oldest, version + 1, length)),
                    logprobs=-generator.uniform(0.5, 5.0, length),
                )
            )
        groups.append(group(prompt, members, group_id=group_id))
    return groups


def unequal_groups():
    """F001: 5, 50, 7, 90, 3, 200, 11 and 64 trained tokens."""
    generator = np.random.default_rng(0)

    def one(length, score):
        tokens = generator.integers(0, 90, length)
        return rollout(
            tokens, score=score, versions=[2] * length, logprobs=-generator.uniform(1, 6, length)
        )

    return [
        group([5, 6, 7], [one(5, 0.0), one(50, 1.0), one(7, 1.0), one(90, 0.0)], group_id=0),
        group([8], [one(3, 0.5), one(200, 0.0), one(11, 0.0), one(64, 1.0)], group_id=1),
    ]
