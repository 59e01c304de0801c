"""Digests whose sums are made on a GPU are those of the host, for pinned memory and other memory."""

import itertools
import random
from pathlib import Path

import pytest
import torch

from asyncrl.weights.device_digests import DeviceDigester
from asyncrl.weights.digests import digest_chunks
from asyncrl.weights.staging import DeviceStaging
from tests.unit.weight_peers import fetch, generating, learning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def host_memory(size: int, *, pinned: bool) -> memoryview:
    values = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    values.copy_(
        torch.frombuffer(bytearray(random.Random(size).randbytes(size)), dtype=torch.uint8)
    )
    return memoryview(values.numpy())


@pytest.mark.parametrize("pinned", [True, False])
def test_they_are_those_that_the_host_makes(pinned):
    sizes = [1, 8248, 16_504, 123_457, 3 * 2**22 + 12_345]
    for size, chunk_bytes in itertools.product(sizes, [8, 999, 8248, 16_497, 16_504, 2**18, 2**22]):
        buffer = host_memory(min(size, 50_001 * chunk_bytes), pinned=pinned)
        expected = digest_chunks(buffer, chunk_bytes, "folded")
        for piece_bytes in (2**20, 2**26):
            digester = DeviceDigester(torch.device("cuda"), piece_bytes=piece_bytes)
            for _ in range(2):  # the second time the scratch is there, and full
                found = digester.digest_chunks(buffer, chunk_bytes)
                assert found == expected, (size, chunk_bytes, piece_bytes)


def test_the_learner_goes_on_computing_meanwhile():
    buffer = host_memory(2**27 + 1000, pinned=True)
    expected = digest_chunks(buffer, 2**22, "folded")
    digester = DeviceDigester(torch.device("cuda"))
    left = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):
        product = left @ left
    assert digester.digest_chunks(buffer, 2**22) == expected
    assert (product == 4096).all()


def test_what_is_published_with_them_is_accepted_on_the_gpu(caplog):
    shm, cuda = Path("/dev/shm"), torch.device("cuda")
    weight = torch.randn(1_000_003, device=cuda)
    with (
        learning([("weight", weight)], shm, "shm", chunk_bytes=2**18, device=cuda) as learner,
        generating(shm, staging=DeviceStaging(cuda)) as subscriber,
    ):
        for version in range(6):
            weight.add_(1.0)
            staged = fetch(subscriber, learner.publish(version))
            ((_, got),) = staged.tensors()
            assert torch.equal(got, weight)
            staged.release()
    assert "no room" not in caplog.text


def test_the_host_makes_them_when_the_gpu_is_full(caplog):
    buffer = host_memory(2**26, pinned=False)
    digester = DeviceDigester(torch.device("cuda"))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        found = [digester.digest_chunks(buffer, 2**22) for _ in range(2)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found == [digest_chunks(buffer, 2**22, "folded")] * 2
    assert caplog.text.count("no room on cuda for digests") == 1
