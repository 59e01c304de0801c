"""From the groups of a step to rows of tokens that a model can read. Numpy; no torch, no I/O.

Invariants: no token is trained that is more than k versions old (a breach raises); num_tokens (N)
is counted before anything is skipped, so it does not depend on packing; equal groups give equal
batches.

A row is a prompt and one or several of its completions, which see the prompt but not each other:

    tokens        p0 p1 p2  a0 a1  b0 b1 b2    the last token of a completion predicts
    segments       0  0  0   1  1   2  2  2    nothing and is left out; -1 is padding
    position_ids   0  1  2   3  4   3  4  5
    predictors         p2->a0, a0->a1, a1->a2    p2->b0, b0->b1, ...

The first token of every completion is predicted by the prompt's last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.algo.advantages import Advantage
from asyncrl.errors import ConfigError, StaleRolloutError
from asyncrl.types import Rollout, RolloutGroup

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward pass: [B, L]; and the tokens trained there: [T], row after row."""

    tokens: Ints
    position_ids: Ints
    segments: Ints

    predictor_index: NDArray[np.int64]
    """[T] where the hidden state that predicts each trained token lies in the flattened [B * L]."""

    targets: Ints
    behaviour_logprobs: Floats
    advantages: Floats
    staleness: Ints
    completion_mask: NDArray[np.bool_]
    """[T] False only for the filler of an empty micro-batch."""

    @property
    def is_causal(self) -> bool:
        """No row holds two completions: plain causal attention, padding at the end, is exact."""
        return int(self.segments.max()) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Everything one rank computes for one optimizer step."""

    version: int
    """The version being trained; the step makes version + 1."""

    max_staleness: int
    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int
    """N: completion tokens of all trained rollouts of the step, over all ranks."""

    has_signal: bool
    """Whether any trained token of the step, on any rank, has an advantage other than 0."""

    sums: dict[str, float]
    """By metric name, of the whole step (the same on every rank)."""

    counts: dict[str, float]
    """"token", "rollout", "scored", "group": what those sums are divided by."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """One completion that trains."""

    rollout: Rollout
    advantage: float
    staleness: Ints


@dataclass(frozen=True, slots=True)
class _Row:
    prompt_tokens: Ints
    completions: tuple[_Trained, ...]

    @property
    def length(self) -> int:
        """Tokens the model reads."""
        return len(self.prompt_tokens) + sum(_num_inputs(c) for c in self.completions)


def build_step(
    groups: Sequence[RolloutGroup],
    *,
    version: int,
    max_staleness: int,
    advantage: Advantage,
    share_prompts: bool,
    micro_batch_tokens: int,
    skip_zero_advantage: bool,
) -> StepBatch:
    """Check, weigh and pack the groups of the step that trains `version`.

    A rollout without a "scored" verdict, or that ended by "abort", trains no token, stays out of
    the baseline and out of N. One whose advantage is exactly 0 counts in N; `skip_zero_advantage`
    leaves it out of the forward pass, which changes no gradient, but then its entropy, behaviour
    weights and mismatch are not measured: what is logged of those describes only the tokens that
    pull.

    Raises:
        StaleRolloutError: a token, trained or not, is from the future or more than k versions old.
        ConfigError: a prompt with one completion is longer than micro_batch_tokens.
    """
    rows: list[_Row] = []
    trained: list[_Trained] = []
    num_mixed = 0
    for group, advantages in zip(groups, _advantages(groups, advantage), strict=True):
        members = _members(group, advantages, version, max_staleness)
        trained += members
        num_mixed += any(m.advantage != 0 for m in members)
        kept = [m for m in members if m.advantage != 0 or not skip_zero_advantage]
        rows += _rows(group, kept, share_prompts, micro_batch_tokens)
    micro_batches = tuple(_pack(rows, micro_batch_tokens))
    num_tokens = sum(len(member.staleness) for member in trained)
    return StepBatch(
        version=version,
        max_staleness=max_staleness,
        micro_batches=micro_batches,
        num_tokens=num_tokens,
        has_signal=num_mixed > 0,
        sums={
            "groups/frac_mixed": float(num_mixed),
            "tokens/trained": float(num_tokens),
            "tokens/forward": float(sum(row.length for row in rows)),
            **_staleness_sums(trained, max_staleness),
        },
        counts={
            "token": float(num_tokens),
            "rollout": float(sum(len(group.rollouts) for group in groups)),
            "scored": float(sum(r.verdict.score is not None for g in groups for r in g.rollouts)),
            "group": float(len(groups)),
        },
    )


def split_for_ranks(step: StepBatch, rank: int, world: int) -> StepBatch:
    """The share of `rank`; every rank gets equally many micro-batches, the last ones perhaps empty.

    Micro-batches are dealt out in turn, longest first, so that ranks finish at about the same time.
    N, sums and counts stay those of the whole step.
    """
    share = list(step.micro_batches[rank::world])
    num_each = -(-len(step.micro_batches) // world)
    share += [_empty_micro_batch()] * (num_each - len(share))
    return replace(step, micro_batches=tuple(share))


def _trains(rollout: Rollout) -> bool:
    return rollout.verdict.status == "scored" and rollout.finish_reason != "abort"


def _advantages(groups: Sequence[RolloutGroup], advantage: Advantage) -> list[NDArray[np.float64]]:
    """One array a group; rollouts that do not train are outside the baseline."""
    scores = [
        [r.verdict.score if _trains(r) else np.nan for r in group.rollouts] for group in groups
    ]
    lengths = [[len(r.completion_tokens) for r in group.rollouts] for group in groups]
    return advantage(
        [np.array(values, np.float64) for values in scores],
        [np.array(values, np.int64) for values in lengths],
    )


def _members(
    group: RolloutGroup, advantages: NDArray[np.float64], version: int, max_staleness: int
) -> list[_Trained]:
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
        if _trains(rollout) and len(staleness):
            members.append(_Trained(rollout, float(advantages[index]), staleness))
    return members


def _rows(
    group: RolloutGroup, members: list[_Trained], share_prompts: bool, micro_batch_tokens: int
) -> list[_Row]:
    """Rows of one group, each no longer than a micro-batch."""
    num_prompt = len(group.prompt_tokens)
    rows: list[_Row] = []
    open_row: list[_Trained] = []
    length = num_prompt
    for member in members:
        size = _num_inputs(member)
        if num_prompt + size > micro_batch_tokens:
            raise ConfigError(
                f"group {group.group_id}: a prompt of {num_prompt} tokens and a completion of "
                f"{len(member.staleness)} do not fit learner.micro_batch_tokens="
                f"{micro_batch_tokens}; raise it, or lower engine.max_completion_tokens"
            )
        if open_row and (not share_prompts or length + size > micro_batch_tokens):
            rows.append(_Row(group.prompt_tokens, tuple(open_row)))
            open_row, length = [], num_prompt
        open_row.append(member)
        length += size
    if open_row:
        rows.append(_Row(group.prompt_tokens, tuple(open_row)))
    return rows


def _pack(rows: Sequence[_Row], micro_batch_tokens: int) -> list[MicroBatch]:
    """Rows by length, longest first, as many to a micro-batch as fit when padded."""
    # Stable: rows of equal length stay in the order of the groups.
    ordered = sorted(rows, key=lambda row: -row.length)
    micro_batches: list[MicroBatch] = []
    start = 0
    while start < len(ordered):
        num_rows = micro_batch_tokens // ordered[start].length
        micro_batches.append(_micro_batch(ordered[start : start + num_rows]))
        start += num_rows
    return micro_batches


def _micro_batch(rows: Sequence[_Row]) -> MicroBatch:
    width = max(row.length for row in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    # Padding counts on, so that a row of one completion stays one ascending sequence.
    positions = np.tile(np.arange(width, dtype=np.int32), (len(rows), 1))
    segments = np.full((len(rows), width), -1, np.int32)
    predictors: list[NDArray[np.int64]] = []
    for index, row in enumerate(rows):
        num_prompt = len(row.prompt_tokens)
        tokens[index, :num_prompt] = row.prompt_tokens
        segments[index, :num_prompt] = 0
        start = num_prompt
        for segment, completion in enumerate(row.completions, start=1):
            size = _num_inputs(completion)
            inside = slice(start, start + size)
            tokens[index, inside] = completion.rollout.completion_tokens[:size]
            positions[index, inside] = np.arange(num_prompt, num_prompt + size)
            segments[index, inside] = segment
            columns = np.concatenate([[num_prompt - 1], np.arange(start, start + size)])
            predictors.append(index * width + columns)
            start += size
    members = [completion for row in rows for completion in row.completions]
    sizes = [len(member.staleness) for member in members]
    logprobs = np.concatenate([m.rollout.behaviour_logprobs for m in members])
    return MicroBatch(
        tokens=tokens,
        position_ids=positions,
        segments=segments,
        predictor_index=np.concatenate(predictors),
        targets=np.concatenate([m.rollout.completion_tokens for m in members]).astype(np.int32),
        # Above 0 by a rounding (types.MAX_LOGPROB) is 0; NaN stays, for the loss to count.
        behaviour_logprobs=np.minimum(logprobs, 0.0).astype(np.float32),
        advantages=np.repeat([m.advantage for m in members], sizes).astype(np.float32),
        staleness=np.concatenate([m.staleness for m in members]).astype(np.int32),
        completion_mask=np.ones(sum(sizes), np.bool_),
    )


def _empty_micro_batch() -> MicroBatch:
    """One row of one token, and one masked-out target: keeps a rank's collectives in step."""
    one, zero = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    return MicroBatch(
        tokens=one,
        position_ids=one,
        segments=one,
        predictor_index=np.zeros(1, np.int64),
        targets=zero,
        behaviour_logprobs=np.zeros(1, np.float32),
        advantages=np.zeros(1, np.float32),
        staleness=zero,
        completion_mask=np.zeros(1, np.bool_),
    )


def _num_inputs(completion: _Trained) -> int:
    """Completion tokens the model reads: all but the last."""
    return len(completion.staleness) - 1


def _staleness_sums(trained: Sequence[_Trained], max_staleness: int) -> dict[str, float]:
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
