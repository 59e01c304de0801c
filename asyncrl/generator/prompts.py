"""From a task's problem to prompt tokens: the chat template is applied here and nowhere else."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.tasks.base import Problem, Split, Task


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be sampled from."""

    ordinal: int
    problem: Problem
    text: str
    """What the model reads, as text."""

    tokens: NDArray[np.int32]
    """[P] token ids."""


class PromptRenderer:
    """Turns (split, ordinal) into a prompt, with one tokenizer and one task."""

    def __init__(self, tokenizer: Any, task: Task) -> None:  # noqa: ANN401 - transformers is untyped
        self._tokenizer = tokenizer
        self._task = task

    def render(self, split: Split, ordinal: int) -> Prompt:
        """The prompt of draw `ordinal` of `split`.

        Raises:
            ConfigError: the task gives chat messages and the tokenizer has no chat template.
        """
        problem = self._task.problem(split, ordinal)
        if problem.messages:
            if not getattr(self._tokenizer, "chat_template", None):
                raise ConfigError(
                    "the task gives chat messages, but the tokenizer of model.path has no chat "
                    "template; use an instruct model or a task with plain-text prompts"
                )
            text = self._tokenizer.apply_chat_template(
                list(problem.messages), tokenize=False, add_generation_prompt=True
            )
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            text = problem.raw_text
            token_ids = self._tokenizer.encode(text)
        return Prompt(ordinal, problem, text, np.asarray(token_ids, np.int32))

    def decode(self, tokens: NDArray[np.int32]) -> str:
        """Completion text without special tokens: what a scorer sees."""
        text: str = self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return text
