"""The seam between the generator and an inference engine.

An engine is driven from one thread: `submit` queues prompts, `step` advances every running completion
by one token, `adopt` swaps weights between two steps. Each token's version is recorded by the engine
itself, at the step that sampled it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.types import FinishReason, VersionSpan
from asyncrl.weights.shared_file import SharedFile
from asyncrl.weights.staging import Staging

NamedTensors = Iterable[tuple[str, torch.Tensor]]

Precision = Literal["float32", "bfloat16", "fp8"]
"""What an engine computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One prompt to be completed `num_completions` times."""

    request_id: int
    """Unique among the engine's unfinished requests; chosen by the caller."""

    prompt_tokens: NDArray[np.int32]
    """[P], P >= 1."""

    num_completions: int
    seed: int
    """Completion i draws from a stream keyed by (seed, i): its uniforms do not depend on what else
    is in the batch."""

    max_tokens: int
    """>= 1; reaching it finishes with "length"."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished completion."""

    request_id: int
    index: int
    """0 .. num_completions - 1."""

    tokens: NDArray[np.int32]
    """[C], C >= 1 unless aborted before the first token; ends with the stop token on "stop"."""

    behaviour_logprobs: NDArray[np.float32]
    """[C] nats, of the distribution really sampled: after temperature, top-k and top-p."""

    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason


class Engine(Protocol):
    """Samples completions; every method is called from the same thread."""

    @property
    def version(self) -> int:
        """Version of the weights that the next step samples under."""

    def staging(self) -> Staging | None:
        """The way to where `adopt` takes tensors from at no cost; None if that is host memory."""

    @property
    def precision(self) -> Precision:
        """What its products are computed in: how far its log-probs may be from the learner's."""

    @property
    def num_unfinished(self) -> int:
        """Completions running or waiting."""

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus completion may not be longer."""

    def submit(self, request: SampleRequest, *, first: bool = False) -> None:
        """Queue a prompt; `first` puts it before all waiting ones.

        Raises:
            ValueError: the prompt is empty, or prompt + max_tokens exceeds max_context_tokens.
        """

    def step(self) -> list[Completion]:
        """Start what fits, sample one token for every running completion, return the finished."""

    def adopt(self, version: int, tensors: NamedTensors, *, file: SharedFile | None = None) -> None:
        """Replace the weights; running completions go on under `version` with their cache kept.

        Args:
            version: of the new weights.
            tensors: (name as in the learner's state dict, values); tied parameters come once. What
                `staging` has brought to the engine's devices may come without values ("meta").
            file: the same tensors, for an engine that has worker processes to read them.

        Raises:
            WeightMismatchError: a name or shape is not this model's, or one is missing; the old
                weights stay and keep their version.
        """

    def abort(self, request_id: int) -> list[Completion]:
        """Finish a request's completions as "abort", with the tokens sampled so far."""

    def score(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probs [T - 1] in nats of tokens 1 .. T - 1 of a given sequence [T], T >= 2.

        Each is given the tokens before it, under the weights of `version` at temperature 1 over the
        whole vocabulary. No token of it is ever returned by `step`; running completions go on.

        Raises:
            ValueError: T < 2, the sequence is too long, or has tokens outside the vocabulary.
        """

    def close(self) -> None:
        """Free the engine's memory."""
