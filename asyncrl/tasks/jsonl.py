"""Prompts and answers from a JSON-lines file.

One object a line: `prompt` (a text, given to the model as it is, or a list of chat messages,
rendered by its chat template), `answer` (text), and anything else, which is ignored. Blank lines
are skipped. Splits go by the prompt's hash: rows with the same prompt share a split, whatever their
answers.

Every epoch of a split is a new permutation that depends on (seed, split, epoch) only.
"""

import json
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path

from asyncrl.config import JsonlTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.base import Problem, Split, canonical_text, is_held_out, stream
from asyncrl.tasks.scorers import Scorer, check_answer, check_scorer, load_scorer

ROLES = ("system", "user", "assistant")


class Jsonl:
    """A task (base.Task) over the rows of one file, read once."""

    def __init__(self, config: JsonlTask, *, seed: int) -> None:
        check_scorer(config.scorer)
        self._scorer = config.scorer
        self._seed = seed
        self._rows: dict[Split, list[Problem]] = {"train": [], "held_out": []}
        for problem in _read(Path(config.path), config.scorer):
            text = canonical_text([list(problem.messages), problem.raw_text])
            held_out = is_held_out(text, config.held_out_fraction)
            self._rows["held_out" if held_out else "train"].append(problem)
        for split, rows in self._rows.items():
            if not rows:
                total = sum(map(len, self._rows.values()))
                raise ConfigError(
                    f"{config.path}: the {split} split is empty, {total} rows with "
                    f"task.held_out_fraction={config.held_out_fraction}; expected both splits to "
                    "hold a row: change the fraction or add rows"
                )
        self._order = lru_cache(maxsize=4)(self._permutation)

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each split; none has 0."""
        return {split: len(rows) for split, rows in self._rows.items()}

    def problem(self, split: Split, ordinal: int) -> Problem:
        """Row `ordinal` of the split's epochs laid end to end."""
        rows = self._rows[split]
        epoch, position = divmod(ordinal, len(rows))
        return rows[self._order(split, epoch)[position]]

    def score(self, problem: Problem, completion: str) -> float | None:
        """What `task.scorer` says; imports the user's file at the first call."""
        return self._loaded_scorer(problem, completion)

    @cached_property
    def _loaded_scorer(self) -> Scorer:
        return load_scorer(self._scorer)

    def _permutation(self, split: Split, epoch: int) -> list[int]:
        order = list(range(len(self._rows[split])))
        stream("jsonl", self._seed, split, epoch).shuffle(order)
        return order


def _read(path: Path, scorer: str) -> Iterator[Problem]:
    num_rows = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    num_rows += 1
                    yield _row(line, scorer, where=f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"task.path: cannot read {path}: {error.strerror}") from error
    if num_rows == 0:
        raise ConfigError(f"task.path: {path} holds no rows; expected one JSON object a line")


def _row(line: bytes, scorer: str, *, where: str) -> Problem:
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip("\r\n"))
    except json.JSONDecodeError as error:  # its own text names a line, of this line alone
        reason = f"{error.msg}: column {error.colno}"
        raise ConfigError(f"{where}: not a line of JSON: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not a line of JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, got {type(row).__name__}")
    for key in ("prompt", "answer"):
        if key not in row:
            raise ConfigError(
                f"{where}: the key {key!r} is missing, got {', '.join(row) or 'none'}"
            )
    answer = row["answer"]
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = json.dumps(answer)  # 42 means "42"
    if not isinstance(answer, str):
        raise ConfigError(f"{where}: answer must be text, got {type(answer).__name__}")
    _check_text(answer, where=f"{where}: answer")
    fault = check_answer(scorer, answer)
    if fault is not None:
        raise ConfigError(f"{where}: answer {fault} (task.scorer={scorer!r})")
    prompt = row["prompt"]
    if isinstance(prompt, str) and prompt:
        _check_text(prompt, where=f"{where}: prompt")
        return Problem(raw_text=prompt, answer=answer)
    return Problem(messages=_messages(prompt, where=where), answer=answer)


def _messages(prompt: object, *, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(prompt, list) or not prompt:
        got = "an empty one" if prompt in ("", []) else type(prompt).__name__
        raise ConfigError(f"{where}: prompt must be a text or a list of messages, got {got}")
    for index, message in enumerate(prompt):
        is_turn = (
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and message["role"] in ROLES
            and isinstance(message["content"], str)
        )
        if not is_turn:
            raise ConfigError(
                f"{where}: prompt[{index}] must be {{'role': one of {', '.join(ROLES)}, "
                f"'content': text}}, got {json.dumps(message)[:80]}"
            )
        _check_text(message["content"], where=f"{where}: prompt[{index}]")
    if prompt[-1]["role"] != "user":
        raise ConfigError(
            f"{where}: the last message must be the user's, got role {prompt[-1]['role']!r}"
        )
    return tuple(prompt)


def _check_text(text: str, *, where: str) -> None:
    """Refuse what JSON can say in escapes and no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where} holds half of a surrogate pair, \\u{ord(text[error.start]):04x} at character "
            f"{error.start}; expected Unicode text: write the whole pair or the character itself"
        ) from error
