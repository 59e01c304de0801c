"""The vLLM engine's book of one completion: what was asked, what was sampled, under which version."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from asyncrl.generator.engine import Completion, SampleRequest
from asyncrl.generator.vllm_lora import PinnedVersion
from asyncrl.types import FinishReason, VersionSpan


@dataclass(slots=True)
class Row:
    """One running completion."""

    request: SampleRequest
    index: int
    pinned: PinnedVersion | None = None
    """What all of its tokens are sampled under, if versions are adapters; None: the engine's version."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of its first token), ascending."""

    def completion(self, finish_reason: FinishReason) -> Completion:
        """What the engine returns of it."""
        ends = [*(start for _, start in self.starts), len(self.tokens)][1:]
        return Completion(
            request_id=self.request.request_id,
            index=self.index,
            tokens=np.array(self.tokens, dtype=np.int32),
            behaviour_logprobs=np.array(self.logprobs, dtype=np.float32),
            version_spans=tuple(
                VersionSpan(version, start, end)
                for (version, start), end in zip(self.starts, ends, strict=True)
            ),
            finish_reason=finish_reason,
        )


def completion_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request: 63 bits, distinct for distinct (seed, index)."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
