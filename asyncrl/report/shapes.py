"""The forms of the records that a page and a frame are made of.

What has another form is dropped, field by field: readers may take the kind of a field for granted, not
its presence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from asyncrl.telemetry.jsonlines import Record, integer, number

Kind = Callable[[object], bool]
Named = Callable[[str, object], bool]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a record may hold."""

    fields: Mapping[str, Kind]
    rest: Named = lambda _name, _value: False
    """Whether to keep a field that is not among `fields`."""


def fit(record: Record, shape: Shape) -> Record:
    """The fields of `record` that have the shape."""
    return {
        name: value
        for name, value in record.items()
        if (shape.fields[name](value) if name in shape.fields else shape.rest(name, value))
    }


def is_version(value: object) -> TypeGuard[int]:
    """A step or version; the wire has 31 bits for one."""
    whole = integer(value)
    return whole is not None and 0 <= whole < 2**31


def is_whole(value: object) -> TypeGuard[int]:
    """An integer."""
    return integer(value) is not None


def is_text(value: object) -> bool:
    """A string."""
    return isinstance(value, str)


def is_known(value: object) -> bool:
    """A number, or the null of one that is missing."""
    return value is None or number(value) is not None


def many(kind: Kind) -> Kind:
    """A list of them."""
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _is_span(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(is_whole, value))


def _are_tokens(value: object) -> bool:
    return isinstance(value, dict) and all(
        many(is_text if name == "text" else is_known)(value.get(name, [])) for name in TOKENS
    )


def _is_metric(name: str, value: object) -> bool:
    """A share of time lies between 0 and 1: its bars are as long as it says."""
    found = number(value)
    return found is not None and (not name.startswith("share/") or 0.0 <= found <= 1.001)


TOKENS = ("text", "behaviour_logprobs", "proximal_logprobs", "behaviour_weights")

STEP = Shape(
    {
        "step": is_version, "version": is_version, "alerts": many(is_text),
        "new_alerts": many(is_text), "skipped": is_text, "bottleneck": is_text,
    },
    rest=_is_metric,
)  # fmt: skip

EVAL = Shape({"version": is_version}, rest=lambda _name, value: is_known(value))

ROLLOUT = Shape(
    {
        "step": is_version, "group_id": is_whole, "index": is_whole, "ordinal": is_whole,
        "generator": is_text, "prompt": is_text, "answer": is_text, "text": is_text,
        "score": is_known, "verdict": is_text, "detail": is_text, "finish_reason": is_text,
        "num_tokens": is_whole, "version_spans": many(_is_span), "advantage": is_known,
        "mean_behaviour_logprob": is_known, "fate": is_text, "tokens": _are_tokens,
    }
)  # fmt: skip

RESTART = Shape({"process": is_text, "cause": is_text, "time": is_text})

DROP = Shape(
    {
        "group_id": is_whole, "ordinal": is_whole, "attempt": is_whole, "version": is_version,
        "reason": is_text, "again": lambda value: isinstance(value, bool), "generator": is_text,
        "scores": many(is_known), "time": is_known, "payload": many(is_text),
    }
)  # fmt: skip
