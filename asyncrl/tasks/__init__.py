"""Verifiable tasks and the pool of processes that scores completions.

`make_task` is for whoever hands out prompts, `make_scorer` for a scoring process, which needs no
data.
"""

from collections.abc import Callable
from typing import get_args

from asyncrl.config import JsonlTask, TaskConfig
from asyncrl.tasks.base import Problem, Split, Task
from asyncrl.tasks.jsonl import Jsonl
from asyncrl.tasks.products import Products
from asyncrl.tasks.reasoning_gym import ReasoningGym
from asyncrl.tasks.repeat_letter import RepeatLetter
from asyncrl.tasks.reverse_digits import ReverseDigits
from asyncrl.tasks.scorers import Scorer, load_scorer

__all__ = ["Problem", "Split", "Task", "make_scorer", "make_task"]

TASKS: dict[str, Callable[..., Task]] = {
    "reverse_digits": ReverseDigits,
    "products": Products,
    "repeat_letter": RepeatLetter,
    "reasoning_gym": ReasoningGym,
    "jsonl": Jsonl,
}
"""`task.kind` to the class that takes (config, *, seed)."""


def make_task(config: TaskConfig, *, seed: int) -> Task:
    """Build the task of a run, reading its data if it has some.

    Raises:
        ConfigError: data or scorer are missing or broken, or an extra is not installed.
    """
    return TASKS[config.kind](config, seed=seed)


def make_scorer(config: TaskConfig, *, seed: int) -> Scorer:
    """Build only what scores: a file of prompts is not read, a user's scorer is imported.

    A data set's generator makes its first problems: many parameters fail only there.

    Raises:
        ConfigError: the scorer is missing or broken, or an extra is not installed.
        Exception: whatever else a user's file or a data set raises.
    """
    if isinstance(config, JsonlTask):
        return load_scorer(config.scorer)
    task = make_task(config, seed=seed)
    for split in get_args(Split):
        task.problem(split, 0)
    return task.score
