"""One held-out evaluation: every sample under one version.

The generator adopts no weights while it runs. Problems and random streams are the same for every
evaluation of a run (common random numbers), so differences between versions are not sampling luck alone.
"""

import hashlib
import time
from collections.abc import Callable

import numpy as np

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import SampleRequest
from asyncrl.generator.groups import Sheaf
from asyncrl.generator.prompts import PromptRenderer
from asyncrl.wire.messages import EvalDone

EVAL_IDS = 2**62
"""Request ids of evaluations start here; group ids stay below."""


class Evaluation:
    """The requests of one evaluation and what has come back."""

    def __init__(
        self,
        config: RunConfig,
        version: int,
        renderer: PromptRenderer,
        max_tokens: Callable[[int], int],
    ) -> None:
        """Prepare `eval.num_prompts` held-out prompts; `max_tokens` gives the limit by prompt length.

        Raises:
            ConfigError: no held-out prompt fits into engine.max_prompt_tokens.
        """
        self._version = version
        self._start_s = time.monotonic()
        self._sheaves: list[Sheaf] = []
        self.requests: list[tuple[int, Sheaf, SampleRequest]] = []
        for ordinal in range(config.eval.num_prompts):
            prompt = renderer.render("held_out", ordinal)
            if prompt.tokens.shape[0] > config.engine.max_prompt_tokens:
                continue
            request = SampleRequest(
                request_id=EVAL_IDS + ordinal,
                prompt_tokens=prompt.tokens,
                num_completions=config.eval.samples_per_prompt,
                seed=eval_seed(config.seed, ordinal),
                max_tokens=max_tokens(int(prompt.tokens.shape[0])),
                temperature=config.eval.sampling.temperature,
                top_p=config.eval.sampling.top_p,
                top_k=config.eval.sampling.top_k,
            )
            sheaf = Sheaf(prompt, config.eval.samples_per_prompt)
            self.requests.append((request.request_id, sheaf, request))
        if not self.requests:
            raise ConfigError(
                f"none of {config.eval.num_prompts} held-out prompts fits into "
                f"engine.max_prompt_tokens={config.engine.max_prompt_tokens}"
            )
        self.requests.reverse()  # each is submitted in front of the queue: the first ends up first

    def owns(self, request_id: int) -> bool:
        """Whether a request belongs to an evaluation."""
        return request_id >= EVAL_IDS

    def finish(self, sheaf: Sheaf) -> None:
        """Take a complete sheaf."""
        self._sheaves.append(sheaf)

    @property
    def done(self) -> bool:
        """Whether every prompt has come back."""
        return len(self._sheaves) == len(self.requests)

    def result(self) -> EvalDone:
        """Mean score over the scored samples (None if there is none), and what it was measured on."""
        verdicts = [verdict for sheaf in self._sheaves for verdict in sheaf.verdicts.values()]
        scores = [verdict.score for verdict in verdicts if verdict.score is not None]
        lengths = [len(c.tokens) for sheaf in self._sheaves for c in sheaf.completions.values()]
        return EvalDone(
            version=self._version,
            mean_score=float(np.mean(scores)) if scores else None,
            num_samples=len(scores),
            num_unscored=len(verdicts) - len(scores),
            mean_tokens=float(np.mean(lengths)),
            seconds=time.monotonic() - self._start_s,
        )


def eval_seed(run_seed: int, ordinal: int) -> int:
    """Seed of held-out prompt `ordinal`: the same for every version of a run."""
    digest = hashlib.blake2b(f"eval/{run_seed}/{ordinal}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
