"""The resolved tree as commented TOML."""

import json
from collections.abc import Sequence
from typing import Literal, get_args, get_origin

from asyncrl.config.run import RunConfig
from asyncrl.config.section import Section


def to_toml(config: RunConfig) -> str:
    """The resolved tree as TOML, every key with its meaning as a comment; `read_config` reads it back.

    A key that follows from others (Section.implied) is a comment itself.
    """
    top, sections = _section_toml(config, "")
    return "\n".join(top) + "\n" + "".join(sections)


def _section_toml(
    section: Section, path: str, variants: Sequence[type[Section]] = ()
) -> tuple[list[str], list[str]]:
    """Lines of plain keys, and the text of each subsection; `kind` chooses among `variants`."""
    lines: list[str] = []
    subsections: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            inner = f"{path}.{name}" if path else name
            keys, deeper = _section_toml(value, inner, get_args(field.annotation))
            head = f"\n[{inner}]  # {_summary(type(value))}\n"
            subsections.append(head + "\n".join(keys) + "\n" + "".join(deeper))
            continue
        if field.description:
            lines += [f"# {text}" for text in field.description.splitlines()]
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) > 1:
            lines.append(f"# one of: {', '.join(map(str, get_args(field.annotation)))}")
        if name == "kind" and variants:
            lines.append("# one of:")
            lines += [f"#   {v.model_fields['kind'].default}: {_summary(v)}" for v in variants]
        hidden = "# " if name in section.implied else ""
        lines.append(f"{hidden}{name} = {toml_value(value)}")
    return lines, subsections


def _summary(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def toml_value(value: object) -> str:
    """One value as TOML: a scalar, a list, or a dict as an inline table."""
    if isinstance(value, dict):
        inner = ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items())
        return "{ " + inner + " }" if inner else "{}"
    # JSON's scalars are TOML's, but for DEL, and for escapes of characters beyond U+FFFF.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
