"""Messages and rollout groups to frames and back: one header (header.py), then raw arrays.

| what         | frame 0: a map of          | frames 1..                                         |
|--------------|----------------------------|----------------------------------------------------|
| message      | its fields, and num_frames | its payload, opaque here                           |
| RolloutGroup | `_GroupHeader`             | prompt tokens; then of all rollouts, end to end,   |
|              |                            | completion tokens (<i4) and log-probs (<f4)        |

Invariant: decode(encode(x)) == x bit for bit, arrays included (whose NaN are facts), and everything
else is a ProtocolError that names the field's path, what came and what was expected. An announced
shape is compared with the bytes that are there before anything is allocated by it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import Buffer

from asyncrl.errors import ProtocolError
from asyncrl.types import FinishReason, Rollout, RolloutGroup, Verdict, VerdictStatus, VersionSpan
from asyncrl.wire import header
from asyncrl.wire.messages import MESSAGE, Batch, Chunk, Count, GroupDone, Manifest, Message

MAX_HEADER_BYTES = header.MAX_HEADER_BYTES

NUM_GROUP_FRAMES = 4

_TOKEN_DTYPE = np.dtype("<i4")
_LOGPROB_DTYPE = np.dtype("<f4")


def encode(message: Message, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """[header, *frames], to be sent as one multipart message; the frames are not copied.

    Raises:
        ProtocolError: the message breaks its schema (a list in it was changed, a float is not
            finite), does not go with that many frames, or its header exceeds a limit.
    """
    head = header.pack(MESSAGE, message.model_dump(warnings=False), num_frames=len(frames))
    _check_num_frames(message, len(frames))
    return [head, *frames]


def decode(frames: Sequence[bytes | memoryview]) -> tuple[Message, list[memoryview]]:
    """The message in frames[0] and views of the payload frames behind it (nothing is copied).

    Raises:
        ProtocolError: the bytes are no message of this protocol.
    """
    if not frames:
        raise ProtocolError("message: got 0 frames, expected a header")
    fields = header.unpack(frames[0])
    num_frames = fields.pop("num_frames", None)
    if type(num_frames) is not int or num_frames != len(frames) - 1:
        raise ProtocolError(
            f"num_frames: got {header.show(num_frames)}, expected {len(frames) - 1}, as came"
        )
    if not isinstance(fields.get("kind", ""), str):  # pydantic would print all of it.
        raise ProtocolError(f"kind: got {header.show(fields['kind'])}, expected a text")
    message = header.validate(MESSAGE, fields)
    _check_num_frames(message, num_frames)
    return message, [memoryview(frame) for frame in frames[1:]]


def _check_num_frames(message: Message, num_frames: int) -> None:
    """Refuse a payload that does not go with its message."""
    match message:
        case GroupDone():
            return
        case Batch():
            expected = sum(ref.num_frames for ref in message.groups)
        case Manifest() | Chunk():
            expected = 1
        case _:
            expected = 0
    if num_frames != expected:
        raise ProtocolError(f"{message.kind}: got {num_frames} payload frames, expected {expected}")


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_Version = Annotated[int, Field(ge=0, lt=2**31)]


class _VerdictHeader(_Header):
    status: VerdictStatus
    score: float | None
    detail: str


class _RolloutHeader(_Header):
    num_tokens: Count
    spans: list[Annotated[list[_Version], Field(min_length=3, max_length=3)]]
    """[version, start, end) of each VersionSpan."""

    finish_reason: FinishReason
    text: str
    verdict: _VerdictHeader


class _Tokens(_Header):
    dtype: Literal["<i4"]
    shape: Annotated[list[Count], Field(min_length=1, max_length=1)]


class _Logprobs(_Header):
    dtype: Literal["<f4"]
    shape: Annotated[list[Count], Field(min_length=1, max_length=1)]


class _GroupHeader(_Header):
    """Frame 0 of a RolloutGroup; completions lie in the frames in the order of `rollouts`."""

    group_id: Count
    ordinal: Count
    prompt_text: str
    answer: str
    prompt_tokens: _Tokens
    completion_tokens: _Tokens
    behaviour_logprobs: _Logprobs
    rollouts: list[_RolloutHeader]


_GROUP_HEADER: TypeAdapter[_GroupHeader] = TypeAdapter(_GroupHeader)


def encode_group(group: RolloutGroup) -> list[Buffer]:
    """NUM_GROUP_FRAMES frames of immutable bytes: the group may change once this has returned.

    Raises:
        ProtocolError: an array has another dtype or rank than types.py says (nothing is cast), a
            field breaks the schema, or the header exceeds a limit.
    """
    prompt = _array_bytes("prompt_tokens", group.prompt_tokens, _TOKEN_DTYPE)
    tokens: list[bytes] = []
    logprobs: list[bytes] = []
    for index, rollout in enumerate(group.rollouts):
        path = f"rollouts.{index}"
        tokens.append(
            _array_bytes(f"{path}.completion_tokens", rollout.completion_tokens, _TOKEN_DTYPE)
        )
        logprobs.append(
            _array_bytes(f"{path}.behaviour_logprobs", rollout.behaviour_logprobs, _LOGPROB_DTYPE)
        )
    num_tokens = group.num_completion_tokens
    fields = {
        "group_id": group.group_id,
        "ordinal": group.ordinal,
        "prompt_text": group.prompt_text,
        "answer": group.answer,
        "prompt_tokens": {"dtype": "<i4", "shape": [len(prompt) // _TOKEN_DTYPE.itemsize]},
        "completion_tokens": {"dtype": "<i4", "shape": [num_tokens]},
        "behaviour_logprobs": {"dtype": "<f4", "shape": [num_tokens]},
        "rollouts": [_rollout_fields(rollout) for rollout in group.rollouts],
    }
    return [header.pack(_GROUP_HEADER, fields), prompt, b"".join(tokens), b"".join(logprobs)]


def decode_group(frames: Sequence[bytes | memoryview]) -> RolloutGroup:
    """The group in `frames`; every array is writable and owns its memory.

    Raises:
        ProtocolError: the frames disagree with their header, or the facts with types.py.
    """
    if len(frames) != NUM_GROUP_FRAMES:
        raise ProtocolError(f"group: got {len(frames)} frames, expected {NUM_GROUP_FRAMES}")
    head = header.validate(_GROUP_HEADER, header.unpack(frames[0]))
    num_tokens = sum(rollout.num_tokens for rollout in head.rollouts)
    for name in ("completion_tokens", "behaviour_logprobs"):
        announced = getattr(head, name).shape[0]
        if announced != num_tokens:
            raise ProtocolError(
                f"{name}.shape: got [{announced}], expected [{num_tokens}], the sum of "
                "rollouts.*.num_tokens"
            )
    prompt = _view("prompt_tokens", frames[1], head.prompt_tokens.shape[0], _TOKEN_DTYPE)
    tokens = _view("completion_tokens", frames[2], num_tokens, _TOKEN_DTYPE)
    logprobs = _view("behaviour_logprobs", frames[3], num_tokens, _LOGPROB_DTYPE)
    rollouts: list[Rollout] = []
    start = 0
    for index, rollout in enumerate(head.rollouts):
        end = start + rollout.num_tokens
        try:
            rollouts.append(_rollout(rollout, tokens[start:end], logprobs[start:end]))
        except ValueError as error:
            raise ProtocolError(f"rollouts.{index}: {error}") from error
        start = end
    return RolloutGroup(
        group_id=head.group_id,
        ordinal=head.ordinal,
        prompt_tokens=prompt.astype(np.int32),
        prompt_text=head.prompt_text,
        answer=head.answer,
        rollouts=tuple(rollouts),
    )


def _rollout_fields(rollout: Rollout) -> dict[str, Any]:
    return {
        "num_tokens": int(rollout.completion_tokens.shape[0]),
        "spans": [[span.version, span.start, span.end] for span in rollout.version_spans],
        "finish_reason": rollout.finish_reason,
        "text": rollout.text,
        "verdict": {
            "status": rollout.verdict.status,
            "score": rollout.verdict.score,
            "detail": rollout.verdict.detail,
        },
    }


def _rollout(head: _RolloutHeader, tokens: NDArray[Any], logprobs: NDArray[Any]) -> Rollout:
    """The rollout of these slices; astype copies them out of the frames, into the native order."""
    verdict = head.verdict
    return Rollout(
        completion_tokens=tokens.astype(np.int32),
        behaviour_logprobs=logprobs.astype(np.float32),
        version_spans=tuple(VersionSpan(*span) for span in head.spans),
        finish_reason=head.finish_reason,
        text=head.text,
        verdict=Verdict(status=verdict.status, score=verdict.score, detail=verdict.detail),
    )


def _array_bytes(path: str, array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    if array.ndim != 1 or array.dtype.newbyteorder("<") != dtype:
        raise ProtocolError(
            f"{path}: got {array.dtype} {list(array.shape)}, expected {dtype.name} of one dimension"
        )
    return array.astype(dtype, copy=False).tobytes()


def _view(path: str, frame: bytes | memoryview, length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    num_bytes = memoryview(frame).nbytes
    if num_bytes != length * dtype.itemsize:
        raise ProtocolError(
            f"{path}: got {num_bytes} bytes, expected {length * dtype.itemsize} for {dtype.name} "
            f"of shape [{length}]"
        )
    return np.frombuffer(frame, dtype)
