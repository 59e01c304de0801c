"""The resolved tree as commented TOML."""

import json
from typing import Literal, get_args, get_origin

from pydantic import BaseModel

from asyncrl.config.run import RunConfig


def to_toml(config: RunConfig) -> str:
    """The resolved tree as TOML, every key with its meaning as a comment; `read_config` reads it back."""
    top, sections = _section_toml(config, "")
    return "\n".join(top) + "\n" + "".join(sections)


def _section_toml(section: BaseModel, path: str) -> tuple[list[str], list[str]]:
    """Lines of plain keys, and the text of each subsection."""
    lines: list[str] = []
    subsections: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            inner = f"{path}.{name}" if path else name
            keys, deeper = _section_toml(value, inner)
            doc = (type(value).__doc__ or "").strip().splitlines()[0]
            subsections.append(f"\n[{inner}]  # {doc}\n" + "\n".join(keys) + "\n" + "".join(deeper))
            continue
        if field.description:
            lines += [f"# {text}" for text in field.description.splitlines()]
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) > 1:
            lines.append(f"# one of: {', '.join(map(str, get_args(field.annotation)))}")
        lines.append(f"{name} = {_toml_value(value)}")
    return lines, subsections


def _toml_value(value: object) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml_value(k)} = {_toml_value(v)}" for k, v in value.items())
        return "{ " + inner + " }" if inner else "{}"
    # JSON's scalars are TOML's, but for DEL, and for escapes of characters beyond U+FFFF.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
