"""What a task is, and the rule that keeps held-out problems out of training.

A problem belongs to the held-out split iff hash(its canonical text) < fraction * 2^64 (blake2b, 64
bits). The text alone decides: not the run's seed, not the order of a file, not the process. So a
problem that is ever evaluated as held-out can never be drawn for training, and duplicates never
straddle splits. Tasks draw until a problem of the asked split comes up (rejection sampling).
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol, TypeVar

from asyncrl.errors import ConfigError

Split = Literal["train", "held_out"]

HELD_OUT_FRACTION = 0.2
"""Of the problems of a synthetic task; data sets have `task.held_out_fraction`."""

MAX_DRAWS = 2_000
"""A split that did not come up by then is empty: at 0.2 the odds of bad luck are 0.8^2000."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One prompt and what is needed to score its completions; plain data, safe to send.

    Exactly one of `messages` and `raw_text` is filled.
    """

    answer: str

    messages: tuple[dict[str, str], ...] = ()
    """Chat turns {"role", "content"}, for the model's chat template with a generation prompt."""

    raw_text: str = ""
    """The prompt as it is, for models without a chat template."""

    reference: str = ""
    """Whatever else the task's own `score` needs (reasoning_gym: the item's index)."""

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.raw_text):
            raise ValueError(
                "a problem has either chat messages or a raw text, got "
                f"{len(self.messages)} messages and {len(self.raw_text)} characters of raw text"
            )

    @property
    def question(self) -> str:
        """The last thing said to the model: the raw text, or the last message's content."""
        return self.raw_text or self.messages[-1]["content"]


class Task(Protocol):
    """A source of problems and the judge of their completions."""

    def problem(self, split: Split, ordinal: int) -> Problem:
        """Draw number `ordinal` (>= 0, no upper end) of a split: the same in every process."""

    def score(self, problem: Problem, completion: str) -> float | None:
        """Score of one completion; None abstains.

        Pure, but not to be trusted: it may hang, raise, return NaN or eat memory on some text, so
        only a scoring process calls it (scoring.py).
        """


def canonical_text(prompt: object) -> str:
    """One text for a prompt given as JSON-like data, independent of key order and spacing."""
    return json.dumps(prompt, sort_keys=True, separators=(",", ":"))


def is_held_out(text: str, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Whether the problem with this canonical text is held out."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def stream(*labels: int | str) -> Random:
    """A generator of random numbers named by `labels`, the same in every process."""
    digest = hashlib.blake2b(canonical_text(labels).encode(), digest_size=16).digest()
    return Random(int.from_bytes(digest, "big"))


def draw_from_split(
    split: Split, rng: Random, draw: Callable[[Random], T], text_of: Callable[[T], str]
) -> T:
    """Draw until the canonical text `text_of(item)` belongs to `split`.

    Raises:
        ConfigError: MAX_DRAWS draws held no problem of this split; the task is too small.
    """
    for _ in range(MAX_DRAWS):
        item = draw(rng)
        if is_held_out(text_of(item)) == (split == "held_out"):
            return item
    raise ConfigError(
        f"the {split} split of this task is empty: none in {MAX_DRAWS} draws; expected about "
        f"{HELD_OUT_FRACTION:.0%} held-out problems; widen the task's settings (section task)"
    )
