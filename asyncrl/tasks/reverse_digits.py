"""Reverse a list of digits: "Reverse this list: 1 4 0" -> "0 4 1".

Palindromes are never asked, so that echoing the prompt always scores 0. The solved examples are
fixed per length and are never asked either, in any split, however many of them the prompt shows.

Score: 1 iff the completion holds exactly one run of digits (spaces and commas inside do not matter)
and it is the reversed list. A second run, or digits after the answer, scores 0.
"""

import re
from random import Random

from asyncrl.config import ReverseDigitsTask
from asyncrl.tasks.base import Problem, Split, canonical_text, draw_from_split, stream

MAX_EXAMPLES = 8

_RUN = re.compile(r"[0-9](?:[\s,]*[0-9])*")


class ReverseDigits:
    """A task (base.Task) over all lists of `num_digits` digits."""

    def __init__(self, config: ReverseDigitsTask, *, seed: int) -> None:
        self._num_digits = config.num_digits
        self._seed = seed
        examples = _examples(config.num_digits)
        self._never_asked = frozenset(examples)
        self._turns: tuple[dict[str, str], ...] = ()
        for digits in examples[: config.num_examples]:
            turn = {"role": "assistant", "content": " ".join(reversed(digits))}
            self._turns += (_question(digits), turn)

    def problem(self, split: Split, ordinal: int) -> Problem:
        """Chat: the solved examples, then the list to reverse."""
        rng = stream("reverse_digits", self._seed, split, ordinal)
        digits = draw_from_split(split, rng, self._draw, canonical_text)
        return Problem(
            messages=(*self._turns, _question(digits)), answer=" ".join(reversed(digits))
        )

    def score(self, problem: Problem, completion: str) -> float:
        """1 or 0."""
        runs = _RUN.findall(completion)
        return float(len(runs) == 1 and re.findall("[0-9]", runs[0]) == problem.answer.split())

    def _draw(self, rng: Random) -> str:
        while True:
            digits = _draw_digits(rng, self._num_digits)
            if digits not in self._never_asked:
                return digits


def _draw_digits(rng: Random, num_digits: int) -> str:
    while True:
        digits = "".join(str(rng.randrange(10)) for _ in range(num_digits))
        if digits != digits[::-1]:
            return digits


def _examples(num_digits: int) -> tuple[str, ...]:
    """MAX_EXAMPLES different lists, the same for every run."""
    rng = stream("reverse_digits examples", num_digits)
    found: dict[str, None] = {}
    while len(found) < MAX_EXAMPLES:
        found[_draw_digits(rng, num_digits)] = None
    return tuple(found)


def _question(digits: str) -> dict[str, str]:
    return {"role": "user", "content": "Reverse this list: " + " ".join(digits)}
