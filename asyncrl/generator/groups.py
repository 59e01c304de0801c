"""Bookkeeping of one prompt's completions from first token to last verdict.

A `Sheaf` is a prompt with its completions and verdicts; training groups and evaluation prompts are both
sheaves. It is complete once every completion has a verdict, in whatever order they come.
"""

from dataclasses import dataclass, field

import numpy as np

from asyncrl.generator.engine import Completion
from asyncrl.generator.prompts import Prompt
from asyncrl.types import MAX_LOGPROB, Rollout, RolloutGroup, Verdict


@dataclass(slots=True)
class Sheaf:
    """One prompt's completions and verdicts while they come in."""

    prompt: Prompt
    size: int
    completions: dict[int, Completion] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every completion has its verdict."""
        return len(self.verdicts) == self.size

    @property
    def usable(self) -> bool:
        """Whether every completion ran to its end with log-probs that can be log-probs."""
        return all(
            c.finish_reason != "abort"
            and bool(np.isfinite(c.behaviour_logprobs).all())
            and bool((c.behaviour_logprobs <= MAX_LOGPROB).all())
            for c in self.completions.values()
        )

    def to_group(self, group_id: int) -> RolloutGroup:
        """The record of a complete, usable sheaf."""
        return RolloutGroup(
            group_id=group_id,
            ordinal=self.prompt.ordinal,
            prompt_tokens=self.prompt.tokens,
            prompt_text=self.prompt.text,
            answer=self.prompt.problem.answer,
            rollouts=tuple(self._rollout(index) for index in range(self.size)),
        )

    def _rollout(self, index: int) -> Rollout:
        completion = self.completions[index]
        return Rollout(
            completion_tokens=completion.tokens,
            behaviour_logprobs=completion.behaviour_logprobs,
            version_spans=completion.version_spans,
            finish_reason=completion.finish_reason,
            text=self.texts[index],
            verdict=self.verdicts[index],
        )
