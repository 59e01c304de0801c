"""Headers: one MessagePack map in a closed schema, the first frame of everything on the wire.

Invariant: what `pack` lets out, `unpack` and `validate` let in: both ends hold one schema, and
every breach is a ProtocolError that names the field's path, what came and what was expected. Floats
are finite and texts are Unicode; an announced length is bounded before anything is allocated by it.

Format: MessagePack specification, https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

import math
import reprlib
from typing import Any, TypeVar

import msgpack
from pydantic import TypeAdapter, ValidationError

from asyncrl.errors import ProtocolError

MAX_HEADER_BYTES = 16 * 2**20

MAX_HEADER_ITEMS = 2**16
"""Longest list or map. The msgpack package allocates a list by its announced length, at each of up
to 1024 nested levels: no header can claim more than 512 MiB of untouched memory."""

_Schema = TypeVar("_Schema")


def pack(schema: TypeAdapter[Any], fields: dict[str, Any], **extra: int) -> bytes:
    """Bytes of a map of `fields`, valid under `schema`, and `extra`.

    Raises:
        ProtocolError: a field breaks the schema, or the header would exceed a limit.
    """
    fields = schema.dump_python(_parse(schema, fields))  # A NumPy scalar is a plain number now.
    _check_values(fields, "")
    header: bytes = msgpack.packb(fields | extra)
    if len(header) > MAX_HEADER_ITEMS:  # A shorter one breaks no limit.
        unpack(header)
    return header


def unpack(frame: bytes | memoryview) -> dict[str, Any]:
    """The map in `frame`, not validated yet.

    Raises:
        ProtocolError: too large, no MessagePack map, or a key is no text or comes twice.
    """
    num_bytes = memoryview(frame).nbytes
    if num_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"header: got {num_bytes} bytes, expected at most {MAX_HEADER_BYTES}")
    max_items = min(num_bytes, MAX_HEADER_ITEMS)
    try:
        fields = msgpack.unpackb(
            frame,
            object_pairs_hook=_unique,
            max_array_len=max_items,
            max_map_len=max_items,
            max_ext_len=0,
        )
    except ValueError as error:
        reason = str(error) or type(error).__name__
        raise ProtocolError(
            f"header: got {num_bytes} bytes that cannot be read ({reason}), expected a MessagePack "
            f"map of unique text keys, at most {MAX_HEADER_ITEMS} items in a list"
        ) from error
    if not isinstance(fields, dict):
        raise ProtocolError(f"header: got {show(fields)}, expected a map")
    return fields


def validate(schema: TypeAdapter[_Schema], fields: dict[str, Any]) -> _Schema:
    """`fields` as an instance of `schema`.

    Raises:
        ProtocolError: a field breaks the schema.
    """
    valid = _parse(schema, fields)
    _check_values(fields, "")  # After the schema, which bounds its depth.
    return valid


def show(value: object) -> str:
    """A short form of what a peer sent; reprlib stops at depth and length, where repr does not."""
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _parse(schema: TypeAdapter[_Schema], fields: dict[str, Any]) -> _Schema:
    try:
        return schema.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"]) or "kind"
    got, expected = show(first["input"]), first["msg"].replace("Input should be ", "")
    match first["type"]:
        case "missing" | "union_tag_not_found":
            got, expected = "nothing", "a value"
        case "extra_forbidden":
            expected = "no such field"
        case "union_tag_invalid":
            got, expected = show(fields["kind"]), f"one of {first['ctx']['expected_tags']}"
    raise ProtocolError(f"{path}: got {got}, expected {expected}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key comes twice")
    return fields


def _check_values(value: object, path: str) -> None:
    """Refuse what the types allow and the wire does not."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ProtocolError(f"{path}: got {value}, expected a finite number")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ProtocolError(f"{path}: got {show(value)}, expected Unicode text") from error
    if isinstance(value, dict):
        for key, item in value.items():
            _check_values(key, f"{path}: key")
            _check_values(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_values(item, f"{path}.{index}")
