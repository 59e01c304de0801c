"""Multiply two numbers: "What is 7 times 8? Answer with just the number." -> "56".

Operands have `num_digits` digits; 0 and 1 are left out, so that the answer is never one of the
operands and echoing the prompt scores 0. "7 times 8" and "8 times 7" are one problem to the split.

Score: 1 iff the last number is the product and every other number is the product or an operand. So
"7 x 8 = 56" counts, and a second candidate ("54 or 56") or numbers after the answer do not.
"""

from random import Random

from asyncrl.config import ProductsTask
from asyncrl.tasks.base import Problem, Split, canonical_text, draw_from_split, stream
from asyncrl.tasks.scorers import last_number, numbers


class Products:
    """A task (base.Task) over all pairs of `num_digits`-digit numbers."""

    def __init__(self, config: ProductsTask, *, seed: int) -> None:
        self._smallest = max(2, 10 ** (config.num_digits - 1))
        self._largest = 10**config.num_digits - 1
        self._seed = seed

    def problem(self, split: Split, ordinal: int) -> Problem:
        """Chat: one question."""
        rng = stream("products", self._seed, split, ordinal)
        a, b = draw_from_split(split, rng, self._draw, lambda pair: canonical_text(sorted(pair)))
        question = f"What is {a} times {b}? Answer with just the number."
        return Problem(messages=({"role": "user", "content": question},), answer=str(a * b))

    def score(self, problem: Problem, completion: str) -> float:
        """1 or 0."""
        allowed = {*numbers(problem.question), problem.answer}
        is_only_candidate = allowed.issuperset(numbers(completion))
        return float(last_number(completion) == problem.answer and is_only_candidate)

    def _draw(self, rng: Random) -> tuple[int, int]:
        return rng.randint(self._smallest, self._largest), rng.randint(
            self._smallest, self._largest
        )
