"""From the groups of a step to the minibatches that update the policy. Numpy; no torch, no I/O.

Invariants: no token is trained that is more than k versions old (a breach raises); N and the scale of
every token are counted before anything is skipped, so they do not depend on packing; equal groups give
equal batches.

A step is one update, or, with several minibatches, as many: its groups in order, cut into parts of equal
size (the first ones one group longer). Every part has its own N, as if it were a step of its own: the
gradient of an update does not depend on what else the step holds, nor on how the part was cut into
micro-batches. The version rises by one per step, and staleness counts from the step's version.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrl.algo.advantages import Advantage
from asyncrl.algo.aggregation import Aggregation
from asyncrl.errors import StaleRolloutError
from asyncrl.learner.packing import MicroBatch, Trained, empty_micro_batch, make_rows, pack
from asyncrl.types import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """Everything one rank computes for one optimizer update."""

    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int
    """N: completion tokens of all trained rollouts of the update, over all ranks."""

    has_signal: bool
    """Whether any of those tokens has an advantage other than 0."""

    forward_tokens: int
    """Tokens the model reads, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Everything one rank computes for one step."""

    version: int
    """The version being trained; the step makes version + 1."""

    max_staleness: int
    minibatches: tuple[Minibatch, ...]
    sums: dict[str, float]
    """By metric name, of the whole step (the same on every rank)."""

    counts: dict[str, float]
    """"token", "rollout", "scored", "group": what those sums are divided by."""

    advantages: tuple[NDArray[np.float64], ...]
    """One array a group, one value a rollout; NaN where it was not judged."""

    details: dict[tuple[int, int], int]
    """(group, rollout) of the step -> place of its first token in StepResult.details."""

    num_detailed_tokens: int

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all trained rollouts of the step, over all ranks."""
        return sum(minibatch.num_tokens for minibatch in self.minibatches)


_Members = list[tuple[RolloutGroup, list[Trained]]]


def build_step(
    groups: Sequence[RolloutGroup],
    *,
    version: int,
    max_staleness: int,
    advantage: Advantage,
    aggregation: Aggregation,
    num_minibatches: int,
    mask_truncated: bool,
    share_prompts: bool,
    micro_batch_tokens: int,
    skip_zero_advantage: bool,
    num_detailed_groups: int = 0,
) -> StepBatch:
    """Check, weigh and pack the groups of the step that trains `version`.

    A rollout without a "scored" verdict, or that ended by "abort", trains no token, stays out of the
    baseline and out of N. With `mask_truncated` one that ended by "length" trains no token and stays
    out of N, but its score stays in the baseline: it says something about the prompt.

    A rollout whose advantage is exactly 0 counts in N; `skip_zero_advantage` leaves it out of the
    forward pass, which changes no gradient if such tokens have none, but then its entropy, behaviour
    weights and mismatch are not measured: what is logged of those describes only the tokens that pull.

    Of the first `num_detailed_groups` groups every token is recorded; groups that teach come first,
    because the others may not go through the forward pass.

    Raises:
        StaleRolloutError: a token, trained or not, is from the future or more than k versions old.
        ConfigError: a prompt with one completion is longer than micro_batch_tokens.
    """
    advantages = _advantages(groups, advantage)
    members: _Members = [
        (group, _members(group, values, mask_truncated, version, max_staleness))
        for group, values in zip(groups, advantages, strict=True)
    ]
    members, details, num_detailed_tokens = _detailed(members, num_detailed_groups)
    minibatches = tuple(
        _minibatch(
            _scaled(part, aggregation), share_prompts, micro_batch_tokens, skip_zero_advantage
        )
        for part in _cut(members, num_minibatches)
    )
    trained = [member for _, inside in members for member in inside]
    num_tokens = sum(member.length for member in trained)
    return StepBatch(
        version=version,
        max_staleness=max_staleness,
        minibatches=minibatches,
        sums={
            "groups/frac_teaching": _num_teaching(members),
            "tokens/trained": float(num_tokens),
            "tokens/forward": float(sum(m.forward_tokens for m in minibatches)),
            **_staleness_sums(trained, max_staleness),
        },
        counts=_counts(groups, num_tokens),
        advantages=tuple(advantages),
        details=details,
        num_detailed_tokens=num_detailed_tokens,
    )


def _num_teaching(members: _Members) -> float:
    return float(sum(any(m.advantage != 0 for m in inside) for _, inside in members))


def _counts(groups: Sequence[RolloutGroup], num_tokens: int) -> dict[str, float]:
    return {
        "token": float(num_tokens),
        "rollout": float(sum(len(group.rollouts) for group in groups)),
        "scored": float(sum(r.verdict.score is not None for g in groups for r in g.rollouts)),
        "group": float(len(groups)),
    }


def split_for_ranks(step: StepBatch, rank: int, world: int) -> StepBatch:
    """The share of `rank`; every rank gets equally many micro-batches, the last ones perhaps empty.

    Micro-batches are dealt out in turn, longest first, so that ranks finish at about the same time.
    N, sums and counts stay those of the whole step.
    """
    shares = []
    for minibatch in step.minibatches:
        share = list(minibatch.micro_batches[rank::world])
        num_each = -(-len(minibatch.micro_batches) // world)
        share += [empty_micro_batch()] * (num_each - len(share))
        shares.append(replace(minibatch, micro_batches=tuple(share)))
    return replace(step, minibatches=tuple(shares))


def _is_judged(rollout: Rollout) -> bool:
    return rollout.verdict.status == "scored" and rollout.finish_reason != "abort"


def _advantages(groups: Sequence[RolloutGroup], advantage: Advantage) -> list[NDArray[np.float64]]:
    """One array a group; rollouts that were not judged are outside the baseline."""
    scores = [
        [r.verdict.score if _is_judged(r) else np.nan for r in group.rollouts] for group in groups
    ]
    lengths = [[len(r.completion_tokens) for r in group.rollouts] for group in groups]
    return advantage(
        [np.array(values, np.float64) for values in scores],
        [np.array(values, np.int64) for values in lengths],
    )


def _members(
    group: RolloutGroup,
    advantages: NDArray[np.float64],
    mask_truncated: bool,
    version: int,
    max_staleness: int,
) -> list[Trained]:
    """The rollouts of a group that train, after every token's staleness was checked."""
    members = []
    for index, rollout in enumerate(group.rollouts):
        staleness = version - rollout.token_versions
        wrong = np.flatnonzero((staleness < 0) | (staleness > max_staleness))
        if len(wrong):
            token = int(wrong[0])
            raise StaleRolloutError(
                f"group {group.group_id}, rollout {index}, token {token} was sampled under version "
                f"{rollout.token_versions[token]}; training version {version} takes versions "
                f"{version - max_staleness}..{version} (pipeline.max_staleness={max_staleness})"
            )
        is_masked = mask_truncated and rollout.finish_reason == "length"
        if _is_judged(rollout) and not is_masked and len(staleness):
            members.append(Trained(rollout, float(advantages[index]), staleness))
    return members


def _detailed(
    members: _Members, num_groups: int
) -> tuple[_Members, dict[tuple[int, int], int], int]:
    """The same with places for the tokens of `num_groups` groups; where they begin; how many."""
    order = sorted(range(len(members)), key=lambda i: all(m.advantage == 0 for m in members[i][1]))
    places: dict[tuple[int, int], int] = {}
    found, place = list(members), 0
    for index in sorted(order[:num_groups]):
        group, inside = members[index]
        numbers = {id(rollout): number for number, rollout in enumerate(group.rollouts)}
        marked = []
        for member in inside:
            places[index, numbers[id(member.rollout)]] = place
            marked.append(replace(member, detail=place))
            place += member.length
        found[index] = (group, marked)
    return found, places, place


def _cut(members: _Members, num_parts: int) -> list[_Members]:
    """Consecutive groups, in parts whose sizes differ by at most one."""
    size, num_longer = divmod(len(members), num_parts)
    starts = [part * size + min(part, num_longer) for part in range(num_parts + 1)]
    return [members[start:end] for start, end in pairwise(starts)]


def _scaled(members: _Members, aggregation: Aggregation) -> _Members:
    """The same with every completion's scale, from the counts of this update."""
    lengths = [member.length for _, inside in members for member in inside]
    prompts = [index for index, (_, inside) in enumerate(members) for _ in inside]
    if not lengths:
        return members
    scales = iter(aggregation(np.array(lengths), np.array(prompts)).tolist())
    return [
        (group, [replace(member, scale=next(scales)) for member in inside])
        for group, inside in members
    ]


def _minibatch(
    members: _Members, share_prompts: bool, micro_batch_tokens: int, skip_zero_advantage: bool
) -> Minibatch:
    rows = []
    for group, inside in members:
        kept = [m for m in inside if m.advantage != 0 or not skip_zero_advantage]
        rows += make_rows(group, kept, share_prompts, micro_batch_tokens)
    trained = [member for _, inside in members for member in inside]
    return Minibatch(
        micro_batches=tuple(pack(rows, micro_batch_tokens)),
        num_tokens=sum(member.length for member in trained),
        has_signal=any(member.advantage != 0 for member in trained),
        forward_tokens=sum(row.length for row in rows),
    )


def _staleness_sums(trained: Sequence[Trained], max_staleness: int) -> dict[str, float]:
    if not trained:
        return {}
    staleness = np.concatenate([member.staleness for member in trained])
    counts = np.bincount(staleness, minlength=max_staleness + 1)
    ages = np.arange(len(counts))
    return {
        "staleness/mean": float(counts @ ages),
        "staleness/max": float(ages[counts > 0].max()),
        **{f"staleness/tokens@{age}": float(count) for age, count in enumerate(counts)},
    }
