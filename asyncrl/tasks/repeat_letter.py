"""The toy task of the smoke run: go on repeating the letter of the prompt, "bbb:" -> "bbbbb...".

The prompt is raw text of `num_letters` possible letters, 1 to MAX_REPEATS times, and a colon.
Counting repeats gives even two letters problems enough for both splits, and lets a tiny model do on
held-out prompts what it learned on others.

Score: the share of the completion's characters that are the letter; 0 for an empty completion.
"""

import string
from random import Random

from asyncrl.config import RepeatLetterTask
from asyncrl.tasks.base import Problem, Split, canonical_text, draw_from_split, stream

MAX_REPEATS = 8


class RepeatLetter:
    """A task (base.Task) over the first `num_letters` letters."""

    def __init__(self, config: RepeatLetterTask, *, seed: int) -> None:
        self._letters = string.ascii_lowercase[: config.num_letters]
        self._seed = seed

    def problem(self, split: Split, ordinal: int) -> Problem:
        """Raw text; the answer is the letter."""
        rng = stream("repeat_letter", self._seed, split, ordinal)
        text = draw_from_split(split, rng, self._draw, canonical_text)
        return Problem(raw_text=text, answer=text[0])

    def score(self, problem: Problem, completion: str) -> float:
        """0 to 1."""
        return completion.count(problem.answer) / len(completion) if completion else 0.0

    def _draw(self, rng: Random) -> str:
        return rng.choice(self._letters) * rng.randint(1, MAX_REPEATS) + ":"
