"""Messages to bytes and back: all survive the trip, and all else is refused by its path."""

import math
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ProtocolError
from asyncrl.wire import messages as m
from asyncrl.wire.codec import MAX_HEADER_BYTES, decode, encode
from asyncrl.wire.header import MAX_HEADER_ITEMS

COUNTS = st.integers(0, 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
STARTS = st.builds(m.GroupStart, group_id=COUNTS, ordinal=COUNTS, attempt=COUNTS, seed=COUNTS)
ANNOUNCEMENTS = st.builds(
    m.Announcement,
    epoch=COUNTS,
    version=COUNTS,
    transport=st.sampled_from(["shm", "tcp"]),
    endpoint=st.text(),
    manifest_digest=st.text(),
    final=st.booleans(),
)
MESSAGES = st.one_of(
    ANNOUNCEMENTS,
    st.builds(m.Work, starts=st.lists(STARTS, max_size=5)),
    st.builds(m.Counters, values=st.dictionaries(st.text(), FINITE)),
    st.builds(
        m.GroupDone,
        group_id=COUNTS,
        scores=st.lists(st.none() | FINITE),
        num_tokens=COUNTS,
        oldest_version=COUNTS,
    ),
    st.builds(m.Welcome, beat_s=FINITE, silence_s=FINITE, announcement=st.none() | ANNOUNCEMENTS),
)


@given(MESSAGES)
def test_a_message_survives_the_trip(message):
    decoded, frames = decode(encode(message))

    assert decoded == message
    assert frames == []


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_payload_frames_come_back_in_order_without_a_copy(payload):
    message = m.GroupDone(group_id=1, scores=[], num_tokens=0, oldest_version=0)

    _, views = decode(encode(message, payload))

    assert [view.obj for view in views] == payload
    assert all(view.obj is frame for view, frame in zip(views, payload, strict=True))


def test_integers_to_2_63_are_exact_and_int_given_for_float_arrives_as_float():
    # 2**63 - 1 has no float64 neighbour: a detour over floats would give 2**63.
    message, _ = decode(encode(m.WantWork(epoch=2**63 - 1, version=2**53 + 1, num_groups=1)))
    assert (message.epoch, message.version) == (2**63 - 1, 2**53 + 1)

    counters, _ = decode([msgpack.packb({"kind": "counters", "values": {"a": 3}, "num_frames": 0})])
    assert type(counters.values["a"]) is float


WANT_WORK = {"kind": "want_work", "epoch": 1, "version": 2, "num_groups": 3}
GROUP_DONE = {
    "kind": "group_done",
    "group_id": 1,
    "scores": [],
    "num_tokens": 1,
    "oldest_version": 0,
}


@pytest.mark.parametrize(
    ("fields", "path", "got", "expected"),
    [
        ({"kind": "want_wrok"}, "kind", "want_wrok", "'want_work'"),
        ({"kind": 3}, "kind", "int 3", "a text"),
        ({"kind": ["beat"]}, "kind", "list", "a text"),
        ({}, "kind", "nothing", "a value"),
        ({"kind": "bye", "failed": False}, "bye.reason", "nothing", "a value"),
        (WANT_WORK | {"colour": "red"}, "want_work.colour", "str 'red'", "no such field"),
        (WANT_WORK | {"version": 2.0}, "want_work.version", "float 2.0", "integer"),
        (WANT_WORK | {"version": True}, "want_work.version", "bool True", "integer"),
        (WANT_WORK | {"version": "2"}, "want_work.version", "str '2'", "integer"),
        (WANT_WORK | {"version": -1}, "want_work.version", "int -1", "equal to 0"),
        (WANT_WORK | {"version": 2**63}, "want_work.version", str(2**63)[:6], "less than"),
        (WANT_WORK | {"num_groups": 0}, "want_work.num_groups", "int 0", "equal to 1"),
        (GROUP_DONE | {"scores": [1.0, "x"]}, "group_done.scores.1", "str 'x'", "number"),
        (GROUP_DONE | {"scores": [1.0, math.nan]}, "scores.1", "nan", "finite"),
        (
            {"kind": "work", "starts": [{"group_id": 1}]},
            "work.starts.0.ordinal",
            "nothing",
            "value",
        ),
        ({"kind": "counters", "values": {"a": math.inf}}, "values.a", "inf", "finite"),
        ({"kind": "counters", "values": {"a": None}}, "counters.values.a", "None", "number"),
        ({"kind": "bye", "reason": b"x"}, "bye.reason", "bytes", "string"),
    ],
)
def test_a_breach_of_the_schema_names_path_got_and_expected(fields, path, got, expected):
    with pytest.raises(ProtocolError) as caught:
        decode([msgpack.packb(fields | {"num_frames": 0})])

    head, tail = str(caught.value).split(": got ", 1)
    assert head == path
    assert got in tail.split(", expected ")[0]
    assert expected in tail.split(", expected ", 1)[1]


@pytest.mark.parametrize("name", ["mean_score", "mean_tokens", "seconds"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused_at_send_with_its_path(name, value):
    good = {"mean_score": 0.5, "mean_tokens": 1.0, "seconds": 2.0}
    message = m.EvalDone(version=1, num_samples=2, num_unscored=2, **good | {name: value})

    with pytest.raises(ProtocolError, match=rf"^{name}: got -?(nan|inf), expected a finite"):
        encode(message)


@pytest.mark.parametrize("value", [np.float32("nan"), math.nan, 1j, "1.5", None, True, [1.0]])
def test_a_value_slipped_into_a_message_is_refused_at_send_with_its_path(value):
    message = m.Counters(values={"a": 1.0})
    message.values["a"] = value  # frozen models still hold mutable dicts

    with pytest.raises(ProtocolError, match=r"^(counters\.)?values\.a: got "):
        encode(message)


def test_numpy_numbers_in_a_message_arrive_exactly_as_plain_ones():
    message = m.Counters(values={"a": 1.0})
    message.values["a"] = np.float32(0.1)

    decoded, _ = decode(encode(message))

    assert decoded.values == {"a": 0.100000001490116119384765625}  # 13421773 / 2**27
    assert type(decoded.values["a"]) is float


def test_text_that_is_no_unicode_is_refused_at_send_with_its_path():
    with pytest.raises(ProtocolError, match=r"^reason: got str .*expected Unicode text"):
        encode(m.Bye(reason="half a pair: \ud800"))


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"\x00",
        b"\xc1",  # never used by MessagePack
        b"\x93\x01\x02\x03",  # a list
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x81\xa4kind\xa2\xff\xfe",  # a text that is not UTF-8
        b"\x81\xa2\xff\xfe\x01",  # a key that is not UTF-8
        b"\x81\x01\x02",  # a key that is a number
        b"\x82\xa4kind\xa4beat\xa4kind\xa4beat",  # a key twice
        b"\x81\xa4kind\xd4\x05x",  # an extension type
        b"\x81\xa4kind\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x80trailing",
    ],
)
def test_bytes_that_are_no_header_are_refused(rubbish):
    with pytest.raises(ProtocolError, match=r"^header: got .*expected"):
        decode([rubbish])


@given(st.binary(max_size=64))
def test_random_bytes_are_refused_and_nothing_else_happens(rubbish):
    with pytest.raises(ProtocolError):
        decode([rubbish])


@given(MESSAGES, st.data())
def test_a_truncated_header_is_refused(message, data):
    [head] = encode(message)
    length = data.draw(st.integers(0, len(head) - 1))

    with pytest.raises(ProtocolError, match=r"^header: got"):
        decode([head[:length]])


def test_a_header_above_the_limit_is_refused_on_both_sides_naming_size_and_limit():
    # 6 bytes of map, key and kind stand before 16 MiB of text: more than the limit in any case.
    message = m.Bye(reason="x" * MAX_HEADER_BYTES)
    with pytest.raises(ProtocolError, match=rf"^header: got \d{{8}} bytes.*{MAX_HEADER_BYTES}"):
        encode(message)

    head = msgpack.packb(message.model_dump() | {"num_frames": 0})
    with pytest.raises(ProtocolError, match=rf"^header: got {len(head)} bytes.*{MAX_HEADER_BYTES}"):
        decode([head])


def test_a_list_above_the_limit_is_refused_on_both_sides():
    scores = [None] * (MAX_HEADER_ITEMS + 1)
    message = m.GroupDone(group_id=1, scores=scores, num_tokens=0, oldest_version=0)
    with pytest.raises(ProtocolError, match=r"exceeds max_array_len"):
        encode(message)
    with pytest.raises(ProtocolError, match=r"exceeds max_array_len"):
        decode([msgpack.packb(message.model_dump() | {"num_frames": 0})])

    fits = m.GroupDone(group_id=1, scores=scores[:-1], num_tokens=0, oldest_version=0)
    assert decode(encode(fits))[0] == fits


@pytest.mark.parametrize("depth", [10, 500, 1000, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"])
@pytest.mark.parametrize(
    "start",
    [
        b"\x82\xaanum_frames\x00\xa4kind",
        b"\x83\xaanum_frames\x00\xa4kind\xa8counters\xa6values",
        b"\x83\xaanum_frames\x00\xa4kind\xa4beat\xa6colour",
        b"\x81\xaanum_frames",
        b"",
    ],
)
def test_deep_nesting_is_refused(depth, opening, start):
    with pytest.raises(ProtocolError, match=r": got "):
        decode([start + opening * depth + b"\x01"])


def test_lists_that_claim_more_than_came_allocate_nothing():
    # 1000 nested lists of 2**32 - 1 items each: 34 TB if the claims were believed.
    bomb = b"\xdd\xff\xff\xff\xff" * 1000
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=r"exceeds max_array_len"):
        decode([bomb])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("claimed", [0, 2, 2**62, -1, 1.0, True, None, "1"])
def test_a_frame_count_that_differs_from_what_came_is_refused(claimed):
    head = msgpack.packb(
        {"kind": "chunk", "epoch": 1, "version": 1, "index": 1} | {"num_frames": claimed}
    )

    with pytest.raises(ProtocolError, match=r"^num_frames: got .*expected 1"):
        decode([head, b"payload"])


def test_no_frames_at_all_are_refused():
    with pytest.raises(ProtocolError, match=r"got 0 frames"):
        decode([])


def batch(num_frames: list[int]) -> m.Batch:
    counts = dict.fromkeys(m.LedgerCounts.model_fields, 0)
    return m.Batch(
        step=1,
        groups=[
            m.GroupRef(group_id=i, generator="g", num_frames=n, queued_s=0.0)
            for i, n in enumerate(num_frames)
        ],
        max_staleness=0,
        cursor=0,
        ledger=m.LedgerCounts(**counts),
        counters={},
        evals=[],
    )


@pytest.mark.parametrize(
    ("message", "frames", "expected"),
    [
        (m.Beat(), [b"x"], 0),
        (m.Chunk(epoch=1, version=1, index=0), [], 1),
        (m.Manifest(epoch=1, version=1), [b"x", b"y"], 1),
        (batch([1, 2]), [b"x"] * 4, 3),
        (batch([1, 2]), [b"x"] * 2, 3),
    ],
)
def test_a_payload_that_does_not_go_with_its_message_is_refused_on_both_sides(
    message, frames, expected
):
    claim = f"^{message.kind}: got {len(frames)} payload frames, expected {expected}"
    with pytest.raises(ProtocolError, match=claim):
        encode(message, frames)
    head = msgpack.packb(message.model_dump() | {"num_frames": len(frames)})
    with pytest.raises(ProtocolError, match=claim):
        decode([head, *frames])
