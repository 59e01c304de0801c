"""From a TOML file and dotted overrides to a validated tree; faults become sentences."""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from asyncrl.config.algorithm import LOSS_KINDS
from asyncrl.config.engine import DEFAULT_KINDS
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError

_VARIANTS = {
    "reverse_digits", "products", "repeat_letter", "reasoning_gym", "jsonl", "hf", "vllm", *LOSS_KINDS,
}  # fmt: skip
"""Pydantic names the variant in the path of a fault; it is no part of the key."""


def read_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file, apply `section.key=value` overrides left to right, validate once.

    A value is parsed as TOML, and is a string if that fails. Setting a section's `kind` to another
    variant resets the section: settings of the old variant do not leak into the new one.

    Raises:
        ConfigError: no such file, not TOML, an override without "=", an unknown key, a bad value.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for item in overrides:
        apply_override(tree, item)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, path, overrides)) from error


def apply_override(tree: dict[str, Any], item: str) -> None:
    """Change `tree` by one `section.key=value`, as `read_config` says.

    Raises:
        ConfigError: `item` is of another form, or a part of its path is a value.
    """
    dotted, equals, text = item.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"override {item!r} is not of the form section.key=value")
    *sections, key = dotted.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {item!r}: {section} is a value, not a section")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    if key == "kind" and node.get("kind", DEFAULT_KINDS.get(".".join(sections))) != value:
        node.clear()
    node[key] = value


def _explain(error: ValidationError, path: Path, overrides: Sequence[str]) -> str:
    """What is wrong, in the file or in the override that brought it in."""
    faults: dict[str, list[str]] = {}
    for fault in error.errors(include_url=False):
        key = ".".join(str(part) for part in fault["loc"] if part not in _VARIANTS)
        faults.setdefault(_source(fault, key, overrides) or str(path), []).append(_say(fault, key))
    return "; ".join(f"{source}: {'; '.join(said)}" for source, said in faults.items())


def _source(fault: ErrorDetails, key: str, overrides: Sequence[str]) -> str:
    """The last override that sets what is wrong, "" if none does.

    What is wrong may be a table: one of an unknown name or kind is the fault of any key in it, while
    values that do not go together may be the file's as well.
    """
    for item in reversed(overrides):
        dotted = item.partition("=")[0]
        in_table = fault["type"] != "value_error" and dotted.startswith(f"{key}.")
        if key and (dotted == key or key.startswith(f"{dotted}.") or in_table):
            return f"override {item!r}"
    return ""


def _say(fault: ErrorDetails, path: str) -> str:
    """One fault: dotted path, what is wrong, and the nearest known key."""
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        known = _known_keys()
        section, _, key = path.rpartition(".")
        beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
        close = difflib.get_close_matches(key, beside, n=1, cutoff=0.6)
        elsewhere = {k for k in known if k.rpartition(".")[2] == key}
        near = (
            (list(elsewhere) if len(elsewhere) == 1 else [])
            or [k for name, k in beside.items() if name in close or _initials(name) == key]
            or [k for k in difflib.get_close_matches(path, known, n=2, cutoff=0.5) if k != section]
            or difflib.get_close_matches(key, [k.split(".")[-1] for k in known], n=1)
        )
        hint = f"; did you mean {near[0]}?" if near else ""
        kinds = [part for part in fault["loc"] if part in _VARIANTS]
        of_kind = f" for {section}.kind={kinds[-1]!r}, but one of another kind" if kinds else ""
        message = "unknown key" + (of_kind if path in known else hint)
    elif fault["type"] not in ("missing", "value_error"):
        message += f", got {fault['input']!r}"
    return f"{path}: {message}" if path else message


def _initials(name: str) -> str:
    """The first letters, as other trainers call a key: lr for learning_rate."""
    return "".join(word[:1] for word in name.split("_"))


def _known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        variants = getattr(field.annotation, "__args__", (field.annotation,))
        for variant in variants:
            if isinstance(variant, type) and issubclass(variant, BaseModel):
                keys += _known_keys(variant, f"{prefix}{name}.")
    return keys
