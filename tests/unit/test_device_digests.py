"""Digests whose sums are made on a device, here the CPU: piece by piece, the same bit for bit."""

import random

import pytest
import torch

from asyncrl.weights.device_digests import DeviceDigester
from asyncrl.weights.digests import digest_chunks
from tests.unit.weight_peers import fetch, fill, generating, learning

CPU = torch.device("cpu")


@pytest.fixture
def sizes(monkeypatch):
    """Elements of every sum that torch makes, in order."""
    found = []
    plain = torch.sum

    def noting(rows, *arguments, **more):
        found.append(rows.numel())
        return plain(rows, *arguments, **more)

    monkeypatch.setattr(torch, "sum", noting)
    return found


# Pieces of 100,000 bytes, rows of 8,248; 16,504 is two of them and 8, and 16,497 no multiple of 8.
@pytest.mark.parametrize("size", [1, 8247, 8248, 16_504, 99_024, 99_025, 198_048, 246_913, 264_064])
@pytest.mark.parametrize(
    "chunk_bytes", [8, 999, 8240, 8248, 8256, 16_497, 16_504, 120_000, 400_000]
)
def test_they_are_those_that_the_host_makes(size, chunk_bytes):
    buffer = memoryview(bytearray(random.Random(size).randbytes(size)))
    found = DeviceDigester(CPU, piece_bytes=100_000).digest_chunks(buffer, chunk_bytes)
    assert found == digest_chunks(buffer, chunk_bytes, "folded")


def test_a_version_is_summed_in_pieces_of_whole_chunks_and_a_short_chunk(sizes):
    buffer = memoryview(bytearray(random.Random(0).randbytes(256_000)))
    digester = DeviceDigester(CPU, piece_bytes=100_000)
    found = digester.digest_chunks(buffer, 16_504)
    # 6 chunks are 99,024 bytes; 15 are 247,560, and 8,440 are left. A chunk has two rows of 1031 words,
    # the rest has one.
    assert sizes == [6 * 2062, 6 * 2062, 3 * 2062, 1031]
    assert len(digester._words) == 12_378  # 99,024 / 8: no more than a piece is taken
    assert found == digest_chunks(buffer, 16_504, "folded")


def test_memory_is_taken_once_for_versions_of_a_size_and_is_no_larger_than_they_are():
    digester = DeviceDigester(CPU)
    places = set()
    for seed in range(3):
        buffer = memoryview(bytearray(random.Random(seed).randbytes(20_001)))
        assert digester.digest_chunks(buffer, 8000) == digest_chunks(buffer, 8000, "folded")
        places.add((digester._words.data_ptr(), len(digester._words)))
    assert {size for _, size in places} == {2501}  # 20,001 / 8, rounded up
    assert len(places) == 1


def test_a_publisher_with_a_device_serves_what_a_generator_accepts(sizes, tmp_path):
    weight = torch.empty(30_000)
    with (
        learning([("weight", weight)], tmp_path, "shm", chunk_bytes=50_000, device=CPU) as learner,
        generating(tmp_path) as subscriber,
    ):
        for version in range(3):
            fill(weight, version)
            staged = fetch(subscriber, learner.publish(version))
            ((_, got),) = staged.tensors()
            assert torch.equal(got, weight)
            staged.release()
    # 120,000 bytes: 2 chunks of 6 rows, and 20,000 with 2.
    assert sizes == [2 * 6 * 1031, 2 * 1031] * 3


def test_a_publisher_over_a_network_keeps_digests_that_withstand_a_forger(sizes, tmp_path):
    with (
        learning([("weight", torch.ones(9000))], tmp_path, "tcp", device=CPU) as learner,
        generating(tmp_path) as subscriber,
    ):
        fetch(subscriber, learner.publish(0)).release()
    assert sizes == []


def test_the_host_makes_them_when_the_device_has_no_room(tmp_path, monkeypatch, caplog):
    weight = torch.empty(30_000)
    tries = []

    def out_of_memory(*_, **__):
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "sum", out_of_memory)
    with (
        learning([("weight", weight)], tmp_path, "shm", device=CPU) as learner,
        generating(tmp_path) as subscriber,
    ):
        for version in range(3):
            fill(weight, version)
            fetch(subscriber, learner.publish(version)).release()
        assert len(learner.publisher._device_digester._words) == 0  # what it got is given back
    assert len(tries) == 1  # not asked again: that would cost the learner's own memory each time
    assert caplog.text.count("no room on cpu for digests") == 1
