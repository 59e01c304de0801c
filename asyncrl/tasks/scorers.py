"""Scorers that more than one task uses, and those that a user names in a file.

A completion earns a score for naming one answer. Several candidates in a row ("7 or 8") are none,
however well the last one fits. Nothing of a completion is ever evaluated or run.

| `task.scorer`      | score                                                                     |
|--------------------|---------------------------------------------------------------------------|
| "exact"            | 1 iff completion and answer are equal, white space at the ends stripped   |
| "last_integer"     | 1 iff the last number is the answer and no other candidate stands beside it |
| "file.py:function" | what the function returns for the arguments it names (None abstains)      |
"""

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.tasks.base import Problem

Scorer = Callable[[Problem, str], "float | None"]

SCORER_ARGUMENTS = ("prompt", "completion", "answer")

_NUMBER = re.compile(
    r"(?<![0-9])(?<![0-9]\.)(?:(?<!\w)-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)
_ALTERNATIVE = re.compile(r"(?:[\s,;:/|&*()\[\]{}$\\]|\bor\b|\band\b)*", re.IGNORECASE)


def numbers(text: str) -> list[str]:
    """Numbers of a text in order, normalised: "1,234" is "1234", "07" is "7", "56.0" is "56"."""
    return [_normalised(match.group()) for match in _NUMBER.finditer(text)]


def last_number(text: str) -> str | None:
    """The last number of a text, normalised; None if there is none or it is one of several
    candidates.

    Candidates are numbers with nothing but spaces, brackets, separators, "or" or "and" between
    them.
    """
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    last = _normalised(matches[-1].group())
    for left, right in zip(reversed(matches[:-1]), reversed(matches[1:]), strict=True):
        if not _ALTERNATIVE.fullmatch(text, left.end(), right.start()):
            break
        if _normalised(left.group()) != last:
            return None
    return last


def _normalised(number: str) -> str:
    sign = "-" if number.startswith("-") else ""
    whole, _, decimals = number.removeprefix("-").replace(",", "").partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    value = f"{whole}.{decimals}" if decimals else whole
    return value if value == "0" else sign + value


def score_exact(problem: Problem, completion: str) -> float:
    """1 iff equal up to white space at the ends."""
    return float(completion.strip() == problem.answer.strip())


def score_last_integer(problem: Problem, completion: str) -> float:
    """1 iff the last number is the answer (`last_number`)."""
    return float(last_number(completion) == _normalised(problem.answer.strip()))


BUILT_IN: dict[str, Scorer] = {"exact": score_exact, "last_integer": score_last_integer}


def check_answer(scorer: str, answer: str) -> str | None:
    """What is wrong with a gold answer under a scorer; None if it can be earned by a completion."""
    if scorer == "exact" and not answer.strip():
        return "is empty, so that an empty completion would earn the score"
    if scorer == "last_integer" and not re.fullmatch(r"-?[0-9]+", answer.strip()):
        return f"is not an integer, got {answer[:80]!r}"
    return None


def check_scorer(spec: str) -> None:
    """Find faults of `task.scorer` without running anything of a user's file.

    Raises:
        ConfigError: no such scorer, file or function, or the file does not parse.
    """
    if spec in BUILT_IN:
        return
    path, name = _split_spec(spec)
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise ConfigError(f"task.scorer={spec!r}: cannot read {path}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"task.scorer={spec!r}: {path} is not valid Python: {error}") from error
    if name not in _defined_names(tree):
        raise ConfigError(f"task.scorer={spec!r}: {path} defines no top-level name {name!r}")


def load_scorer(spec: str) -> Scorer:
    """The scorer itself; imports a user's file, so only scoring processes call it.

    Raises:
        ConfigError: as `check_scorer`, or the function asks for an argument that does not exist.
    """
    check_scorer(spec)
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    path, name = _split_spec(spec)
    module_spec = importlib.util.spec_from_file_location("asyncrl_user_scorer", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"task.scorer={spec!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    sys.path.append(str(path.parent.resolve()))  # modules beside it can be imported, last in line
    module_spec.loader.exec_module(module)
    function = getattr(module, name)
    wanted = _wanted_arguments(spec, function)

    def score(problem: Problem, completion: str) -> float | None:
        prompt = problem.raw_text or [dict(message) for message in problem.messages]
        given = {"prompt": prompt, "completion": completion, "answer": problem.answer}
        result: float | None = function(**{key: given[key] for key in wanted})
        return result

    return score


def _split_spec(spec: str) -> tuple[Path, str]:
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"task.scorer={spec!r} is not a scorer; expected {', '.join(map(repr, BUILT_IN))} or "
            "'file.py:function'"
        )
    return Path(file), name


def _defined_names(tree: ast.Module) -> set[str]:
    """Names that the statements of a module bind, blocks such as `if` and `try` included."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        pending += ast.iter_child_nodes(node)
    return names


def _wanted_arguments(spec: str, function: object) -> list[str]:
    if not callable(function):
        raise ConfigError(f"task.scorer={spec!r} is not a function, got {type(function).__name__}")
    wanted: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return list(SCORER_ARGUMENTS)
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.name in SCORER_ARGUMENTS:
            wanted.append(parameter.name)
        elif (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        ):
            raise ConfigError(
                f"task.scorer={spec!r} asks for an argument {parameter.name!r}; expected names out "
                f"of {', '.join(SCORER_ARGUMENTS)}"
            )
    return wanted
