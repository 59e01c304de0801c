"""Rows of tokens that a model can read, from completions that train. Numpy; no torch, no I/O.

A row is a prompt and one or several of its completions, which see the prompt but not each other:

    tokens        p0 p1 p2  a0 a1  b0 b1 b2    the last token of a completion predicts
    segments       0  0  0   1  1   2  2  2    nothing and is left out; -1 is padding
    position_ids   0  1  2   3  4   3  4  5
    predictors         p2->a0, a0->a1, a1->a2    p2->b0, b0->b1, ...

The first token of every completion is predicted by the prompt's last token. A completion is never
split: what a loss sums over one is whole in its micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
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

    sequence: NDArray[np.int64]
    """[T] which completion of this micro-batch a token belongs to, 0..S-1."""

    scale: Floats
    """[T] the token's share under the aggregation."""

    detail: NDArray[np.int64]
    """[T] the token's place among those that are recorded one by one (details.py); -1: it is not."""

    @property
    def is_causal(self) -> bool:
        """No row holds two completions: plain causal attention, padding at the end, is exact."""
        return int(self.segments.max()) <= 1


@dataclass(frozen=True, slots=True)
class Trained:
    """One completion that trains."""

    rollout: Rollout
    advantage: float
    staleness: Ints
    """[C] of each of its tokens; C is at least 1."""

    scale: float = 1.0
    """Of each of its tokens (algo/aggregation.py)."""

    detail: int = -1
    """Place of its first token among those that are recorded one by one; -1: they are not."""

    @property
    def length(self) -> int:
        """Completion tokens: what trains."""
        return len(self.staleness)

    @property
    def num_inputs(self) -> int:
        """Completion tokens the model reads: all but the last."""
        return len(self.staleness) - 1


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and completions of it."""

    prompt_tokens: Ints
    completions: tuple[Trained, ...]

    @property
    def length(self) -> int:
        """Tokens the model reads."""
        return len(self.prompt_tokens) + sum(c.num_inputs for c in self.completions)


def make_rows(
    group: RolloutGroup, members: list[Trained], share_prompts: bool, micro_batch_tokens: int
) -> list[Row]:
    """Rows of one group, each no longer than a micro-batch.

    Raises:
        ConfigError: a prompt with one completion is longer than micro_batch_tokens.
    """
    num_prompt = len(group.prompt_tokens)
    rows: list[Row] = []
    open_row: list[Trained] = []
    length = num_prompt
    for member in members:
        size = member.num_inputs
        if num_prompt + size > micro_batch_tokens:
            raise ConfigError(
                f"group {group.group_id}: a prompt of {num_prompt} tokens and a completion of "
                f"{member.length} do not fit learner.micro_batch_tokens="
                f"{micro_batch_tokens}; raise it, or lower engine.max_completion_tokens"
            )
        if open_row and (not share_prompts or length + size > micro_batch_tokens):
            rows.append(Row(group.prompt_tokens, tuple(open_row)))
            open_row, length = [], num_prompt
        open_row.append(member)
        length += size
    if open_row:
        rows.append(Row(group.prompt_tokens, tuple(open_row)))
    return rows


def pack(rows: Sequence[Row], micro_batch_tokens: int) -> list[MicroBatch]:
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


def _micro_batch(rows: Sequence[Row]) -> MicroBatch:
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
            size = completion.num_inputs
            inside = slice(start, start + size)
            tokens[index, inside] = completion.rollout.completion_tokens[:size]
            positions[index, inside] = np.arange(num_prompt, num_prompt + size)
            segments[index, inside] = segment
            columns = np.concatenate([[num_prompt - 1], np.arange(start, start + size)])
            predictors.append(index * width + columns)
            start += size
    members = [completion for row in rows for completion in row.completions]
    sizes = [member.length for member in members]
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
        sequence=np.repeat(np.arange(len(members)), sizes),
        scale=np.repeat([m.scale for m in members], sizes).astype(np.float32),
        detail=np.concatenate([_places(member) for member in members]),
    )


def _places(member: Trained) -> NDArray[np.int64]:
    if member.detail < 0:
        return np.full(member.length, -1, np.int64)
    return np.arange(member.detail, member.detail + member.length)


def empty_micro_batch() -> MicroBatch:
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
        sequence=np.zeros(1, np.int64),
        scale=np.zeros(1, np.float32),
        detail=np.full(1, -1, np.int64),
    )
