"""Weights on their way into a GPU: pinned files, digests summed there, adapters merged by one kernel."""

import mmap
from pathlib import Path

import pytest
import torch

from asyncrl.errors import WeightMismatchError
from asyncrl.generator.copy_plan import CopyPlan, Part, layout_of
from asyncrl.generator.shard_server import StagedShard
from asyncrl.weights.adapter import merged_weight
from asyncrl.weights.pinning import Pins
from asyncrl.weights.staging import DeviceStaging
from tests.unit.weight_peers import (
    TRANSPORTS,
    WAIT_S,
    bits,
    fetch,
    generating,
    learning,
    odd_tensors,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("chunk_bytes", [999, 8192, 2**20])
def test_every_version_arrives_bit_for_bit(transport, chunk_bytes, caplog):
    shm = Path("/dev/shm")
    cuda = torch.device("cuda")
    named = [(name, tensor.to(cuda)) for name, tensor in odd_tensors(0)]
    named.append(("large", torch.randn(300_001, device=cuda)))
    with (
        learning(named, shm, transport, chunk_bytes=chunk_bytes) as learner,
        generating(shm, staging=DeviceStaging(cuda)) as subscriber,
    ):
        for version in range(6):
            named[-1][1].add_(1.0)
            staged = fetch(subscriber, learner.publish(version))
            got = list(staged.tensors())
            assert all(tensor.is_cuda for _, tensor in got if tensor.numel())
            assert [(n, bits(t.cpu())) for n, t in got] == [(n, bits(t.cpu())) for n, t in named]
            staged.release()
    assert "cudaHostRegister" not in caplog.text  # nothing was left unpinned


def test_a_page_changed_behind_the_publishers_back_is_found_on_the_gpu():
    shm = Path("/dev/shm")
    weight = torch.randn(100_000, device="cuda")
    with (
        learning([("weight", weight)], shm, "shm", chunk_bytes=8192) as learner,
        generating(shm, staging=DeviceStaging(torch.device("cuda"))) as subscriber,
    ):
        announcement = learner.publish(0)
        with Path(announcement.endpoint).open("r+b") as file:
            file.seek(50_000)  # chunk 6 = [49,152, 57,344)
            file.write(b"torn")
        subscriber.start(announcement)
        with pytest.raises(WeightMismatchError, match="chunk 6 of 49 in"):  # 400,000 / 8,192 = 48.8
            subscriber.wait(WAIT_S)
        fetch(subscriber, learner.publish(1)).release()


def test_a_workers_part_is_not_staged_into_memory_that_the_decode_still_reads():
    """What a kernel in flight reads may have been freed already: the allocator goes by its stream."""
    num = 2**24
    values = torch.full((num,), 2.0).pin_memory()
    parameter = torch.zeros(num, device="cuda")
    plan = CopyPlan([(parameter, Part("w", (num,), (1,), 0))], {"w": layout_of(values)})
    freed = torch.full((num,), 1.0, device="cuda")
    torch.cuda._sleep(2 * 10**9)  # about a second
    read = freed.clone()
    del freed
    shard = StagedShard(plan)
    shard.fill({"w": values})
    shard.load()
    torch.cuda.synchronize()
    assert (read == 1.0).all()
    assert (parameter == 2.0).all()


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(caplog):
    """CUDA keeps a refusal as the thread's last error, and the next launch would report it as its own."""
    memory = mmap.mmap(-1, 2**20)
    values = torch.frombuffer(memory, dtype=torch.uint8).fill_(7)
    owners = [type("Owner", (), {})() for _ in range(2)]
    Pins().pin(owners[0], memory)
    assert "unpinned" not in caplog.text
    Pins().pin(owners[1], memory)  # refused: it is already
    assert "1048576 bytes stay unpinned" in caplog.text
    there = [torch.zeros(2**20, dtype=torch.uint8, device="cuda")]
    torch._foreach_copy_(there, [values], non_blocking=True)
    assert (there[0].cpu() == 7).all()


def test_a_product_is_not_rounded_before_it_is_added():
    # As in tests/unit/test_adapter.py: 1 + 2^-8 + 2^-17 is rounded up, 1 + 2^-8 to even, which is 1.
    base = torch.ones(2, 8, 8, dtype=torch.bfloat16, device="cuda")
    a = torch.tensor([2.0**-9, 2.0**-9, 2.0**-17]).bfloat16()[None, :, None].expand(2, 3, 8)
    b = torch.ones(2, 8, 3, dtype=torch.bfloat16)
    assert (merged_weight(base, a, b, 1.0) == 1 + 2**-7).all()
    assert (base == 1.0).all()


@pytest.mark.parametrize(
    ("modules", "out", "into", "rank"),
    [(1, 256, 512, 8), (3, 576, 1536, 16), (2, 1, 64, 1), (9, 512, 256, 64), (3, 70, 130, 100)],
)
def test_a_merged_weight_is_the_exact_sum_rounded_once(modules, out, into, rank):
    draw = torch.Generator().manual_seed(out)
    base, a, b = (
        torch.randn(modules, *shape, generator=draw).bfloat16()
        for shape in ((out, into), (rank, into), (out, rank))
    )
    merged = merged_weight(base.cuda(), a, b, 0.5)
    exact = base.double() + 0.5 * b.double() @ a.double()
    # Half of bfloat16's spacing, 2^-8 of the value at most, and float32's error of sums this long.
    assert ((merged.cpu().double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5 * rank).all()
    assert (merged.cpu() == exact.bfloat16()).double().mean() > 0.999
