"""Manifests: their layout, and that a lying one is never read."""

import hashlib
import itertools
import math
import random
import tracemalloc

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.digests import digest, digest_chunks, folded_digests
from asyncrl.weights.manifest import (
    DTYPES,
    Manifest,
    find_corrupt_chunk,
    lay_out,
    manifest_digest,
    tensor_views,
)
from tests.unit.weight_peers import huge_manifest, make_manifest, make_probe


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=4)),
        min_size=1,
        max_size=8,
    )
)
def test_tensors_lie_in_order_aligned_and_without_overlap(entries):
    named = [(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(entries)]
    specs, total_bytes = lay_out(named)
    taken = [0] * total_bytes  # how many tensors own each byte
    end = 0
    for spec, (name, dtype, shape) in zip(specs, named, strict=True):
        size = DTYPES[dtype].itemsize
        for dimension in shape:
            size *= dimension
        assert (spec.name, spec.shape, spec.num_bytes) == (name, shape, size)
        assert spec.offset % 64 == 0
        assert spec.offset >= end
        assert spec.offset - end < 64  # no more padding than needed
        for byte in range(spec.offset, spec.offset + size):
            taken[byte] += 1
        end = spec.offset + size
    assert max(taken) <= 1


def read(fields: dict[str, object], limit: int = 2**20) -> Manifest:
    data = msgpack.packb(fields)
    return Manifest.from_bytes(data, expected_digest=manifest_digest(data), max_total_bytes=limit)


def change_tensor(index: int, **changes) -> dict[str, object]:
    fields = make_manifest()
    fields["tensors"][index].update(changes)
    return fields


@pytest.mark.parametrize("probe", [None, make_probe(), make_probe(logprobs=[-3.5, -0.1])])
def test_a_right_manifest_is_read_and_its_bytes_are_canonical(probe):
    manifest = read(make_manifest(probe=probe))
    assert manifest.to_bytes() == msgpack.packb(make_manifest(probe=probe))
    assert [manifest.chunk_range(i) for i in range(manifest.num_chunks)] == [(0, 100), (100, 192)]


@pytest.mark.parametrize(
    "fields",
    [
        make_manifest(total_bytes=193),
        make_manifest(total_bytes=2**40),
        make_manifest(total_bytes=-1),
        make_manifest(chunk_bytes=0),
        make_manifest(chunk_bytes=2**27),
        make_manifest(chunk_digests=[]),
        make_manifest(chunk_digests=[bytes(32)] * 3),
        make_manifest(chunk_digests=[bytes(16)] * 2),
        make_manifest(tensors=[]),
        make_manifest(extra=1),
        make_manifest(version="0"),
        change_tensor(0, shape=[2, 4]),
        change_tensor(0, shape=[-2, -3]),
        change_tensor(0, shape=[2**47, 2**47]),
        change_tensor(0, num_bytes=28),
        change_tensor(0, dtype="complex64"),
        change_tensor(0, name="b"),
        change_tensor(0, name=""),
        change_tensor(1, offset=0),
        change_tensor(1, offset=128),
        change_tensor(1, offset=24),
        make_manifest(probe={}),
        make_manifest(probe=make_probe(extra=1)),
        make_manifest(probe=make_probe(tokens=[5, 6])),
        make_manifest(probe=make_probe(tokens=[5], first_logprobs=[])),
        make_manifest(probe=make_probe(tokens=[5, -1, 7])),
        make_manifest(probe=make_probe(tokens=[5, 2**31, 7])),
        make_manifest(probe=make_probe(tokens=[5, 6.0, 7])),
        make_manifest(probe=make_probe(tokens=[5] * 4097, first_logprobs=[-1.0] * 4096)),
        make_manifest(probe=make_probe(first_logprobs=[-1.0])),
        make_manifest(probe=make_probe(first_logprobs=[-1.0, math.nan])),
        make_manifest(probe=make_probe(first_logprobs=None)),
        make_manifest(probe=make_probe(logprobs=[-1.0, -math.inf])),
        make_manifest(probe=make_probe(logprobs=[-1.0])),
        make_manifest(probe=make_probe(logprobs=["-1", "-2"])),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(fields):
    with pytest.raises(WeightMismatchError, match="consistent"):
        read(fields)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x90" * 2000, b"\x01"])
def test_rubbish_is_not_a_manifest(data):
    with pytest.raises(WeightMismatchError, match="consistent"):
        Manifest.from_bytes(data, expected_digest=manifest_digest(data), max_total_bytes=2**20)


def test_a_manifest_with_another_digest_is_refused():
    with pytest.raises(WeightMismatchError, match="digest"):
        Manifest.from_bytes(
            msgpack.packb(make_manifest()), expected_digest="00" * 32, max_total_bytes=2**20
        )


def test_a_huge_claim_is_refused_before_memory_is_taken():
    fields = huge_manifest()
    tracemalloc.start()
    try:
        with pytest.raises(WeightMismatchError, match=str(2**40)):
            read(fields, limit=2**30)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**24  # the manifest's own half megabyte, several times over; not its claim


def test_a_view_past_the_end_of_the_buffer_is_refused():
    specs = read(make_manifest()).tensors
    with pytest.raises(WeightMismatchError, match="b ends at byte 164"):
        list(tensor_views(bytearray(163), specs))


def folded_by_hand(chunk: bytes) -> bytes:
    """1031 sums of words, one word at a time."""
    num_words = len(chunk) // 8 // 1031 * 1031
    sums = [0] * 1031
    for word in range(num_words):
        sums[word % 1031] += int.from_bytes(chunk[8 * word : 8 * word + 8], "little")
    head = b"".join((total % 2**64).to_bytes(8, "little") for total in sums)
    return hashlib.sha256(head + chunk[8 * num_words :]).digest()


@pytest.mark.parametrize("size", [0, 7, 8247, 8248, 8249, 40_000])  # 8,248 = 8 * 1031
def test_a_folded_digest_is_that_of_column_sums_and_rest(size):
    chunk = random.Random(size).randbytes(size)
    assert digest(chunk, "folded") == folded_by_hand(chunk)


# 16,497 + 8,248: a rest of whole words that begins at an odd byte.
@pytest.mark.parametrize("size", [1, 8248, 24_745, 32_992, 40_001])
@pytest.mark.parametrize("chunk_bytes", [1, 999, 1000, 8247, 8248, 8256, 16_497, 60_000])
def test_folded_digests_of_a_tensor_are_those_of_its_bytes(size, chunk_bytes):
    if chunk_bytes == 1 and size > 1:
        size = 3
    data = random.Random(size).randbytes(size)
    found = folded_digests(torch.frombuffer(bytearray(data), dtype=torch.uint8), chunk_bytes)
    pieces = [data[at : at + chunk_bytes] for at in range(0, size, chunk_bytes)]
    assert list(found) == [folded_by_hand(piece) for piece in pieces]


@pytest.mark.parametrize("size", [10_000, 120_000, 124_690])
def test_folded_digests_wait_for_the_device_once(size, monkeypatch):
    waits = []
    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda values: waits.append(1) or plain(values))
    assert len(folded_digests(torch.zeros(size, dtype=torch.uint8), 10_000)) == -(-size // 10_000)
    assert waits == [1]


@given(st.integers(0, 19_999), st.integers(0, 7))
def test_every_changed_bit_changes_a_folded_digest(place, bit):
    chunk = bytearray(random.Random(0).randbytes(20_000))
    before = digest(chunk, "folded")
    chunk[place] ^= 1 << bit
    assert digest(chunk, "folded") != before


def test_pages_in_another_order_change_a_folded_digest():
    pages = [random.Random(i).randbytes(4096) for i in range(5)]
    digests = {digest(b"".join(order), "folded") for order in itertools.permutations(pages)}
    assert len(digests) == 120


def test_no_two_pages_of_a_usual_chunk_can_change_places_unseen():
    """One that is not empty has another digest in each of the 1,024 places that 4 MiB have."""
    chunk = bytearray(2**22)
    chunk[:4096] = random.Random(0).randbytes(4096)
    digests = {digest(chunk, "folded")}
    for at in range(4096, 2**22, 4096):
        chunk[at : at + 4096], chunk[at - 4096 : at] = chunk[at - 4096 : at], bytes(4096)
        digests.add(digest(chunk, "folded"))
    assert len(digests) == 1024


def test_each_kind_of_digest_finds_the_corrupt_chunk():
    data = random.Random(1).randbytes(10_000)
    for kind in ("sha256", "folded"):
        manifest = Manifest.model_construct(
            total_bytes=10_000, chunk_bytes=3000, digest_kind=kind,
            chunk_digests=digest_chunks(memoryview(data), 3000, kind),
        )  # fmt: skip
        for place, expected in ((0, 0), (2999, 0), (3000, 1), (9999, 3)):
            broken = bytearray(data)
            broken[place] ^= 1
            assert find_corrupt_chunk(memoryview(broken), manifest) == expected
        assert find_corrupt_chunk(memoryview(data), manifest) is None
