"""The facts that travel: prompts, rollouts, verdicts. Numpy only; nothing here can be recomputed.

Derived quantities (advantages, masks, packing, staleness) belong to the reader, not to the record.
Shapes: P = prompt tokens, C = completion tokens of one rollout.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end-of-sequence token was sampled; length: the token limit; abort: given up, untrainable."""

VerdictStatus = Literal["scored", "abstained", "timeout", "error"]

GROUPS_PER_EPOCH = 2**40
"""Group ids of epoch e start at e times this: no name, and no seed made from it, is used twice."""

MAX_LOGPROB = 1e-3
"""Nats. Above 0 by no more than this is rounding and is clamped; above it the record is refused."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Completion tokens [start, end) were sampled under `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the scorer said of one completion; `score` is None unless status is "scored"."""

    status: VerdictStatus
    score: float | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.status == "scored") != (self.score is not None):
            raise ValueError(f"status {self.status!r} does not go with score {self.score!r}")
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"a score must be finite, got {self.score}; use status 'error'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One completion with the behaviour facts of every token, and its verdict."""

    completion_tokens: NDArray[np.int32]
    """[C] sampled token ids as the engine produced them; never re-tokenised."""

    behaviour_logprobs: NDArray[np.float32]
    """[C] log mu of each token in nats, from the distribution it was really sampled from."""

    version_spans: tuple[VersionSpan, ...]
    """Ascending, contiguous, covering [0, C); several if weights were adopted while sampling."""

    finish_reason: FinishReason
    text: str
    """The completion decoded, special tokens left out; what the scorer saw."""

    verdict: Verdict

    def __post_init__(self) -> None:
        num_tokens = self.completion_tokens.shape[0]
        if self.behaviour_logprobs.shape != (num_tokens,):
            raise ValueError(
                f"completion_tokens [{num_tokens}] and behaviour_logprobs "
                f"{self.behaviour_logprobs.shape} differ in length"
            )
        position = 0
        version = -1
        for span in self.version_spans:
            if span.start != position or span.end <= span.start or span.version <= version:
                raise ValueError(f"version spans must ascend and be contiguous, got {span}")
            position, version = span.end, span.version
        if position != num_tokens:
            raise ValueError(f"version spans cover {position} of {num_tokens} tokens")
        if num_tokens and float(np.nanmax(self.behaviour_logprobs)) > MAX_LOGPROB:
            raise ValueError("a behaviour log-prob is positive; the engine's log-probs are broken")

    @property
    def token_versions(self) -> NDArray[np.int32]:
        """[C] version that sampled each token."""
        lengths = [span.end - span.start for span in self.version_spans]
        return np.repeat(np.array([s.version for s in self.version_spans], np.int32), lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The rollouts of one prompt: the unit of admission, advantage and batching."""

    group_id: int
    ordinal: int
    """Which draw of the training stream the prompt is; prompts repeat when a data set wraps."""

    prompt_tokens: NDArray[np.int32]
    """[P] token ids given to the model, chat template included."""

    prompt_text: str
    answer: str
    rollouts: tuple[Rollout, ...]

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens of all rollouts."""
        return sum(int(r.completion_tokens.shape[0]) for r in self.rollouts)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token of the group; staleness counts from it."""
        return min(span.version for r in self.rollouts for span in r.version_spans)
