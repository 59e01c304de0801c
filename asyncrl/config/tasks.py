"""Settings of the tasks; `kind` chooses one."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.section import Section


class ReverseDigitsTask(Section):
    """Reverse a list of digits; a difficulty ladder."""

    kind: Literal["reverse_digits"] = "reverse_digits"
    num_digits: int = Field(3, ge=2, le=32)
    num_examples: int = Field(1, ge=0, le=8)
    """Solved examples shown in the prompt; without one the packaged 135M model rambles."""


class ProductsTask(Section):
    """Multiply two numbers; the last integer of the answer counts."""

    kind: Literal["products"] = "products"
    num_digits: int = Field(1, ge=1, le=6)


class RepeatLetterTask(Section):
    """Toy task of `make smoke`: the score is the share of characters equal to the asked letter."""

    kind: Literal["repeat_letter"] = "repeat_letter"
    num_letters: int = Field(4, ge=2, le=26)


class ReasoningGymTask(Section):
    """A data set of the reasoning-gym package (extra `gym`)."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    params: dict[str, int | float | str | bool] = Field(default_factory=dict)
    """Keyword arguments of the data set's generator."""

    min_score: float = Field(0.99, ge=0.0, le=1.0)
    """Scores under it count as 0, others as 1; 0 keeps the library's partial credit."""


class JsonlTask(Section):
    """Prompts and answers from a JSON-lines file, scored by a named scorer."""

    kind: Literal["jsonl"] = "jsonl"
    path: str
    """One object a line with `prompt` (text, or a list of chat messages) and `answer`."""

    scorer: str = "exact"
    """"exact", "last_integer", or "file.py:function" taking (prompt, completion, answer) by name."""

    held_out_fraction: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of the rows, chosen by content hash, that training never sees."""


TaskConfig = Annotated[
    ReverseDigitsTask | ProductsTask | RepeatLetterTask | ReasoningGymTask | JsonlTask,
    Field(discriminator="kind"),
]
