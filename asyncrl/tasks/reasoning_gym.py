"""Data sets of the reasoning-gym package (extra `gym`), as tasks.

An item is a function of (run seed, index), the same in every process; a problem carries the index,
and the scoring process makes the item again to have all that the package's own scorer reads. Splits
go by the question's hash, so an item that comes up twice stays in its split.

Score: `score_answer` of the text between the last <answer> tags, or of the whole completion without
tags; under `min_score` it counts as 0, otherwise as 1 (min_score = 0 keeps the package's partial
credit). An empty answer, and one that repeats the question, score 0 whatever the package says.
"""

from functools import lru_cache
from random import Random
from typing import Any

from asyncrl.config import ReasoningGymTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.base import Problem, Split, draw_from_split, stream

NUM_ITEMS = 100_000
"""Items drawn from, unless task.params.size says otherwise; some data sets prepare them all."""


class ReasoningGym:
    """A task (base.Task) over one data set."""

    def __init__(self, config: ReasoningGymTask, *, seed: int) -> None:
        self._min_score = config.min_score
        self._seed = seed
        self._dataset = _create(config, seed)
        self._item = lru_cache(maxsize=256)(self._dataset.__getitem__)

    def problem(self, split: Split, ordinal: int) -> Problem:
        """Chat: the item's question."""
        rng = stream("reasoning_gym", self._seed, split, ordinal)
        index = draw_from_split(split, rng, self._draw, self._question)
        message = {"role": "user", "content": self._question(index)}
        answer = self._item(index)["answer"]
        return Problem(
            messages=(message,),
            answer="" if answer is None else str(answer),
            reference=str(index),
        )

    def score(self, problem: Problem, completion: str) -> float:
        """1 or 0; 0 to 1 with min_score = 0."""
        from reasoning_gym.utils import extract_answer

        tagged: str | None = extract_answer(completion)
        answer = completion.strip() if tagged is None else tagged
        if not answer or problem.question.strip() in answer:
            return 0.0
        entry = self._item(int(problem.reference))
        score = float(self._dataset.score_answer(answer=answer, entry=entry))
        return score if self._min_score == 0.0 else float(score >= self._min_score)

    def _draw(self, rng: Random) -> int:
        return rng.randrange(len(self._dataset))

    def _question(self, index: int) -> str:
        return str(self._item(index)["question"])


def _create(config: ReasoningGymTask, seed: int) -> Any:  # noqa: ANN401 - the package is untyped
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.kind='reasoning_gym' needs a package that is missing ({error.name}); "
            "pip install asyncrl[gym]"
        ) from error
    if config.dataset not in DATASETS:
        raise ConfigError(
            f"task.dataset={config.dataset!r} is not in reasoning-gym; expected one of "
            f"{', '.join(sorted(DATASETS))}"
        )
    params = {"size": NUM_ITEMS, "seed": seed % 2**31, **config.params}
    try:
        return reasoning_gym.create_dataset(config.dataset, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"task.params={dict(config.params)} do not suit reasoning-gym's {config.dataset!r} "
            f"(task.params.size={params['size']}): {error}"
        ) from error
