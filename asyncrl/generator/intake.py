"""What an engine refuses at once: requests that could never run."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from asyncrl.generator.engine import SampleRequest


def check_request(
    request: SampleRequest,
    *,
    vocabulary: int,
    max_context_tokens: int,
    max_concurrent_completions: int,
    unfinished: Collection[int],
) -> None:
    """Refuse a request that the engine cannot run to its end.

    Args:
        request: what was asked.
        vocabulary: token ids are in 0 .. vocabulary - 1.
        max_context_tokens: prompt plus completion may not be longer.
        max_concurrent_completions: a request's completions run together.
        unfinished: ids that are taken.

    Raises:
        ValueError: naming the first field that is out of its range, and the key that sets it.
    """
    prompt = request.prompt_tokens
    total = prompt.shape[0] + request.max_tokens
    for valid, fault in (
        (prompt.ndim == 1 and prompt.shape[0] > 0, "the prompt is empty"),
        (
            bool(((prompt >= 0) & (prompt < vocabulary)).all()),
            f"the prompt has token ids outside 0 .. {vocabulary - 1}",
        ),
        (request.max_tokens >= 1, f"max_tokens must be >= 1, got {request.max_tokens}"),
        (
            total <= max_context_tokens,
            f"{prompt.shape[0]} prompt tokens + max_tokens={request.max_tokens} exceed the "
            f"model's {max_context_tokens} positions; lower engine.max_prompt_tokens or "
            "engine.max_completion_tokens",
        ),
        (
            1 <= request.num_completions <= max_concurrent_completions,
            "num_completions must be 1 .. engine.max_concurrent_completions="
            f"{max_concurrent_completions}, got {request.num_completions}",
        ),
        (request.temperature > 0, f"temperature must be > 0, got {request.temperature}"),
        (0 < request.top_p <= 1, f"top_p must be in (0, 1], got {request.top_p}"),
        (request.top_k >= 0, f"top_k must be >= 0, got {request.top_k}"),
        (request.request_id not in unfinished, "an unfinished request has this id"),
    ):
        if not valid:
            raise ValueError(f"request {request.request_id}: {fault}")


def check_sequence(tokens: NDArray[np.int32], *, vocabulary: int, max_tokens: int) -> None:
    """Refuse a sequence that the engine cannot score.

    Args:
        tokens: what was given.
        vocabulary: token ids are in 0 .. vocabulary - 1.
        max_tokens: of the sequence.

    Raises:
        ValueError: it has fewer than 2 tokens or more than `max_tokens`, or one outside the vocabulary.
    """
    if not 2 <= len(tokens) <= max_tokens:
        raise ValueError(f"a scored sequence has 2 .. {max_tokens} tokens, got {len(tokens)}")
    if not ((tokens >= 0) & (tokens < vocabulary)).all():
        raise ValueError(f"a scored sequence has token ids outside 0 .. {vocabulary - 1}")
