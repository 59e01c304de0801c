"""Groups to bytes and back, bit for bit; frames that disagree with their header are refused."""

import math
import struct
import tracemalloc
from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ProtocolError
from asyncrl.types import Rollout, RolloutGroup, Verdict, VersionSpan
from asyncrl.wire.codec import NUM_GROUP_FRAMES, decode_group, encode_group

COUNTS = st.integers(0, 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def verdicts(draw):
    status = draw(st.sampled_from(["scored", "abstained", "timeout", "error"]))
    score = draw(FINITE) if status == "scored" else None
    return Verdict(status=status, score=score, detail=draw(st.text(max_size=5)))


@st.composite
def rollouts(draw):
    num_tokens = draw(st.integers(0, 20))
    cuts = draw(st.sets(st.integers(1, num_tokens - 1))) if num_tokens > 1 else set()
    edges = [0, *sorted(cuts), num_tokens] if num_tokens else [0]
    first = draw(st.integers(0, 2**31 - 32))
    ints = st.integers(-(2**31), 2**31 - 1)
    floats = st.floats(max_value=0.0, width=32) | st.just(math.nan)
    logprobs = draw(st.lists(floats, min_size=num_tokens, max_size=num_tokens))
    if num_tokens:
        logprobs[0] = -1.0  # types.py takes the largest of those that are numbers
    tokens = draw(st.lists(ints, min_size=num_tokens, max_size=num_tokens))
    return Rollout(
        completion_tokens=np.array(tokens, np.int32),
        behaviour_logprobs=np.array(logprobs, np.float32),
        version_spans=tuple(
            VersionSpan(first + i, *edges[i : i + 2]) for i in range(len(edges) - 1)
        ),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(st.text(max_size=10)),
        verdict=draw(verdicts()),
    )


GROUPS = st.builds(
    RolloutGroup,
    group_id=COUNTS,
    ordinal=COUNTS,
    prompt_tokens=st.lists(st.integers(0, 2**31 - 1), max_size=9).map(
        lambda tokens: np.array(tokens, np.int32)
    ),
    prompt_text=st.text(max_size=10),
    answer=st.text(max_size=10),
    rollouts=st.lists(rollouts(), max_size=4).map(tuple),
)


def make_group() -> RolloutGroup:
    """P = 2; two rollouts of 3 and 1 tokens: frames of 8, 16 and 16 bytes behind the header."""
    first = Rollout(
        completion_tokens=np.array([10, 20, 30], np.int32),
        behaviour_logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
        version_spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
        finish_reason="stop",
        text="six",
        verdict=Verdict(status="scored", score=1.0),
    )
    second = replace(
        first,
        completion_tokens=np.array([40], np.int32),
        behaviour_logprobs=np.array([-4.0], np.float32),
        version_spans=(VersionSpan(4, 0, 1),),
    )
    return RolloutGroup(
        group_id=1,
        ordinal=2,
        prompt_tokens=np.array([5, 6], np.int32),
        prompt_text="2*3",
        answer="6",
        rollouts=(first, second),
    )


def facts(record):
    """A record as nested tuples, arrays as (dtype, bytes), so that NaN equals itself."""
    if isinstance(record, np.ndarray):
        return (record.dtype.str, record.shape, record.tobytes())
    if isinstance(record, tuple):
        return tuple(facts(item) for item in record)
    if isinstance(record, RolloutGroup | Rollout):
        return tuple(facts(getattr(record, field.name)) for field in fields(record))
    return record


def group_frames(change=None) -> list[bytes]:
    """make_group() encoded, its header changed in place by `change`."""
    head, *arrays = encode_group(make_group())
    header = msgpack.unpackb(head)
    if change is not None:
        change(header)
    return [msgpack.packb(header), *arrays]


@given(GROUPS)
def test_a_group_survives_the_trip_bit_for_bit(group):
    frames = encode_group(group)

    assert len(frames) == NUM_GROUP_FRAMES
    assert facts(decode_group(frames)) == facts(group)


def test_arrays_lie_in_the_frames_as_documented():
    _, prompt, tokens, logprobs = encode_group(make_group())

    assert prompt == struct.pack("<2i", 5, 6)
    assert tokens == struct.pack("<4i", 10, 20, 30, 40)
    assert logprobs == struct.pack("<4f", -1, -2, -3, -4)


def test_arrays_with_strides_or_swapped_bytes_keep_their_values():
    group = make_group()
    strided = np.arange(100, dtype=np.int32)[10:40:10]  # 10, 20, 30
    swapped = np.array([-1.0, -2.0, -3.0], ">f4")
    first = replace(group.rollouts[0], completion_tokens=strided, behaviour_logprobs=swapped)

    frames = encode_group(replace(group, rollouts=(first, group.rollouts[1])))

    assert facts(decode_group(frames)) == facts(group)


def test_decoded_arrays_are_writable_and_independent_of_frames_and_of_each_other():
    frames = [bytearray(frame) for frame in encode_group(make_group())]
    group = decode_group([memoryview(frame) for frame in frames])
    again = decode_group([memoryview(frame) for frame in frames])

    for frame in frames[1:]:
        frame[:] = bytes(len(frame))
    group.prompt_tokens[:] = 0
    group.rollouts[0].completion_tokens[:] = 0
    group.rollouts[0].behaviour_logprobs[:] = 0

    assert facts(group.rollouts[1]) == facts(make_group().rollouts[1])
    assert facts(again) == facts(make_group())


def test_a_group_changed_after_encoding_was_sent_as_it_was():
    group = make_group()
    frames = encode_group(group)
    group.prompt_tokens[:] = 0
    group.rollouts[1].completion_tokens[:] = 0

    assert facts(decode_group(frames)) == facts(make_group())


@pytest.mark.parametrize(
    ("name", "array", "path"),
    [
        ("completion_tokens", np.array([1, 2, 3], np.int64), "rollouts.0.completion_tokens"),
        ("completion_tokens", np.array([1, 2, 3], np.float32), "rollouts.0.completion_tokens"),
        ("behaviour_logprobs", np.array([-1, -2, -3], np.float64), "rollouts.0.behaviour_logprobs"),
        ("behaviour_logprobs", np.array([-1, -2, -3], np.float16), "rollouts.0.behaviour_logprobs"),
    ],
)
def test_an_array_of_another_dtype_is_refused_not_cast(name, array, path):
    group = make_group()
    changed = replace(group.rollouts[0], **{name: array})

    with pytest.raises(ProtocolError, match=rf"^{path}: got {array.dtype}"):
        encode_group(replace(group, rollouts=(changed,)))


def test_a_prompt_of_two_dimensions_is_refused():
    with pytest.raises(ProtocolError, match=r"^prompt_tokens: got int32 \[1, 2\]"):
        encode_group(replace(make_group(), prompt_tokens=np.array([[1, 2]], np.int32)))


def test_group_facts_outside_the_schema_are_refused_at_send_with_their_path():
    with pytest.raises(ProtocolError, match=r"^ordinal: got int64 "):
        encode_group(replace(make_group(), ordinal=np.int64(3)))
    with pytest.raises(ProtocolError, match=r"^prompt_text: got str .*Unicode"):
        encode_group(replace(make_group(), prompt_text="\udc80"))


def set_at(*path):
    """A change of a header: the last item is the value, the others lead to it."""
    *keys, last, value = path

    def change(header):
        for key in keys:
            header = header[key]
        header[last] = value

    return change


HUGE = 2**62


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            set_at("rollouts", 0, "num_tokens", 2),
            r"^completion_tokens.shape: got \[4\], expected \[3\]",
        ),
        (
            set_at("rollouts", 0, "num_tokens", HUGE),
            r"^completion_tokens.shape: got \[4\], expected",
        ),
        (set_at("completion_tokens", "shape", [5]), r"^completion_tokens.shape: got \[5\]"),
        (set_at("behaviour_logprobs", "shape", [5]), r"^behaviour_logprobs.shape: got \[5\]"),
        (
            set_at("prompt_tokens", "shape", [HUGE]),
            f"^prompt_tokens: got 8 bytes, expected {HUGE * 4}",
        ),
        (set_at("prompt_tokens", "shape", [1]), "^prompt_tokens: got 8 bytes, expected 4"),
        (set_at("prompt_tokens", "shape", [1, 2]), "^prompt_tokens.shape: got list"),
        (set_at("prompt_tokens", "shape", [-2]), "^prompt_tokens.shape.0: got int -2"),
        (set_at("prompt_tokens", "dtype", "<i8"), "^prompt_tokens.dtype: got str '<i8'"),
        (set_at("prompt_tokens", "dtype", "O"), "^prompt_tokens.dtype: got str 'O'"),
        (set_at("behaviour_logprobs", "dtype", "<i4"), "^behaviour_logprobs.dtype: got str '<i4'"),
        (set_at("colour", 1), "^colour: got int 1, expected no such field"),
        (set_at("rollouts", 1, "colour", 1), "^rollouts.1.colour: got int 1"),
        (set_at("rollouts", 1, "finish_reason", "eos"), "^rollouts.1.finish_reason: got str 'eos'"),
        (set_at("rollouts", 0, "spans", 0, 1, -1), "^rollouts.0.spans.0.1: got int -1"),
        (set_at("rollouts", 0, "spans", 0, [1, 2]), "^rollouts.0.spans.0: got list"),
        (set_at("rollouts", 0, "spans", 0, 0, 2**31), "^rollouts.0.spans.0.0: got int 2147483648"),
        (set_at("rollouts", 0, "spans", 1, 2, 9), "^rollouts.0: version spans cover 9 of 3"),
        (set_at("rollouts", 0, "spans", 1, 0, 3), "^rollouts.0: version spans must ascend"),
        (set_at("rollouts", 1, "spans", []), "^rollouts.1: version spans cover 0 of 1"),
        (set_at("rollouts", 0, "verdict", "score", None), "^rollouts.0: status 'scored'"),
        (set_at("rollouts", 0, "verdict", "score", math.nan), "^rollouts.0.verdict.score: got nan"),
        (set_at("rollouts", 0, "text", b"\xff"), "^rollouts.0.text: got bytes"),
    ],
)
def test_a_group_header_that_does_not_hold_is_refused(change, error):
    with pytest.raises(ProtocolError, match=error):
        decode_group(group_frames(change))


def test_a_positive_logprob_is_refused_with_the_rollout_it_is_in():
    # F020.
    frames = group_frames()
    frames[3] = struct.pack("<4f", -1, -2, -3, 0.3)

    with pytest.raises(ProtocolError, match=r"^rollouts.1: a behaviour log-prob is positive"):
        decode_group(frames)


@pytest.mark.parametrize(("index", "name"), [(1, "prompt"), (2, "completion"), (3, "behaviour")])
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b[:-4], lambda b: b + b"\0" * 4])
def test_an_array_frame_of_another_size_than_announced_is_refused(index, name, change):
    frames = group_frames()
    frames[index] = change(frames[index])

    with pytest.raises(
        ProtocolError, match=rf"^{name}\w+: got {len(frames[index])} bytes, expected"
    ):
        decode_group(frames)


def test_claimed_sizes_allocate_nothing_before_they_are_compared():
    def claim(header):
        header["completion_tokens"]["shape"] = header["behaviour_logprobs"]["shape"] = [2**40]
        header["rollouts"][0]["num_tokens"] = 2**40 - 1

    frames = group_frames(claim)
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=rf"^completion_tokens: got 16 bytes, expected {2**42}"):
        decode_group(frames)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("num_frames", [0, 3, 5])
def test_another_number_of_group_frames_is_refused(num_frames):
    frames = [*group_frames(), b""][:num_frames]

    with pytest.raises(ProtocolError, match=rf"^group: got {num_frames} frames, expected 4"):
        decode_group(frames)
