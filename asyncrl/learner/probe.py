"""The learner's word in the canary: log-probs of one fixed sequence, published with the weights.

The sequence is NUM_TOKENS random tokens by the run's seed: every process of a run and every attempt at it
has the same. Its log-probs are taken at temperature 1

| under                        | when                                                                  |
|------------------------------|-----------------------------------------------------------------------|
| the weights of model.path    | before the first step, also if a checkpoint is resumed: that is what   |
|                              | generators start from, whenever they start                             |
| a published version          | the first DENSE after the learner's start, then every PERIOD-th        |

With a checkpoint model.path is loaded for it, and freed again, before the checkpoint is: nothing has to
be stored, and both are always of the same code and type. PERIOD is a prime, so that a generator that
skips versions in a regular stride meets the ones that count.

Invariant: all ranks enter `score` together, and it changes nothing of the policy.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from asyncrl.config import RunConfig
from asyncrl.errors import NonFiniteLossError
from asyncrl.learner.model import Policy
from asyncrl.weights.manifest import Probe

NUM_TOKENS = 64
DENSE = 4
PERIOD = 7


@dataclass(frozen=True, slots=True)
class Prober:
    """The fixed sequence and its log-probs under the first weights."""

    tokens: NDArray[np.int32]
    """[T], T >= 2."""

    first_logprobs: NDArray[np.float32]
    """[T - 1]."""

    @classmethod
    def begin(cls, policy: Policy, config: RunConfig) -> Self | None:
        """Take the log-probs of `policy`, which has the weights of model.path and is not sharded yet.

        None without weights.canary, or if the engine's context has no room for two tokens.

        Raises:
            NonFiniteLossError: the model gives log-probs that are not finite.
        """
        engine = config.engine
        room = min(engine.max_prompt_tokens + engine.max_completion_tokens, policy.num_positions)
        num_tokens = min(NUM_TOKENS, room - 1)  # vLLM samples one more
        if not config.weights.canary or num_tokens < 2:
            return None
        tokens = fixed_tokens(policy.vocabulary, seed=config.seed, num_tokens=num_tokens)
        return cls(tokens, _to_host(sequence_logprobs(policy, tokens), "model.path"))

    def score(self, policy: Policy, *, num_passed: int) -> Tensor | None:
        """[T - 1] log-probs on the policy's device, not waited for; None if they are not due.

        Args:
            policy: as it will be published.
            num_passed: versions since the learner's start.
        """
        if num_passed > DENSE and num_passed % PERIOD:
            return None
        return sequence_logprobs(policy, self.tokens)

    def probe(self, version: int, logprobs: Tensor | None) -> Probe:
        """What travels with `version`; `logprobs` are what `score` gave.

        Raises:
            NonFiniteLossError: they are not finite.
        """
        found = None if logprobs is None else _to_host(logprobs, f"version {version}").tolist()
        return Probe(
            tokens=self.tokens.tolist(), first_logprobs=self.first_logprobs.tolist(), logprobs=found
        )


def fixed_tokens(vocabulary: int, *, seed: int, num_tokens: int) -> NDArray[np.int32]:
    """The sequence of a run; a shorter one is the beginning of a longer one."""
    return np.random.default_rng(seed).integers(0, vocabulary, num_tokens).astype(np.int32)


@torch.no_grad()
def sequence_logprobs(policy: Policy, tokens: NDArray[np.int32]) -> Tensor:
    """[T - 1] log-probs of tokens 1 .. T - 1, each given those before it. Collective if sharded."""
    device = next(policy.parameters()).device
    given = torch.from_numpy(tokens).long().to(device)
    places = torch.arange(len(given), device=device)
    logprobs: Tensor = policy(given[None], places[None], None, places[:-1], given[1:], 1.0)[0]
    if isinstance(policy, FSDPModule):
        policy.reshard()  # no backward follows that would, and others look at the parameters
    return logprobs


def _to_host(logprobs: Tensor, what: str) -> NDArray[np.float32]:
    found: NDArray[np.float32] = logprobs.cpu().numpy()
    if not np.isfinite(found).all():
        raise NonFiniteLossError(
            f"the log-probs of a fixed sequence under {what} are not finite: its weights are broken; "
            "look at optimizer/grad_norm and mismatch/* in metrics.jsonl"
        )
    return found
