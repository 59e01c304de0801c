"""Learner-like and generator-like processes on loopback: five versions of 10 MB, and a kill."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from asyncrl.errors import PeerLostError
from asyncrl.weights.buffers import SHM_DIR, HostBuffer, HostBuffers, remove_leftovers
from asyncrl.weights.manifest import tensor_views
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.snapshot import Snapshotter, named_weights
from asyncrl.weights.subscriber import Subscriber
from asyncrl.wire.messages import Announcement

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


class Model(nn.Module):
    """5.2 M parameters in odd shapes, tied, with a counter: 10.5 MB in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4099, 1021)
        self.head = nn.Linear(1021, 4099, bias=False)
        self.head.weight = self.embedding.weight
        self.layer = nn.Linear(1021, 1021)
        self.register_buffer("num_steps", torch.tensor(0))


def digest(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Over names, types, shapes and bits; knows nothing of manifests."""
    total = hashlib.blake2b()
    for name, tensor in tensors:
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.detach().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def tell(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def learner_main(run_id: str, transport: str) -> None:
    """For each version on stdin: change every weight, tell the bf16 digest, publish."""
    torch.manual_seed(0)
    weights = named_weights(Model())
    publisher = Publisher(
        run_id,
        epoch=1,
        transport=transport,
        chunk_bytes=2**20 - 3,
        token="key",
        on_published=lambda announcement: tell(announcement=announcement.model_dump()),
    )
    snapshotter = Snapshotter(weights, dtype="bfloat16", buffers=publisher.buffers)
    for line in sys.stdin:
        for _, tensor in weights:
            tensor.data.add_(1)
        cast = [(n, t.bfloat16() if t.is_floating_point() else t) for n, t in weights]
        tell(digest=digest(cast))
        publisher.publish(snapshotter.take(int(line)))
        for _, tensor in weights:  # the next step begins at once; undone before the next version
            tensor.data.neg_()
        for _, tensor in weights:
            tensor.data.neg_()
    publisher.close()


def generator_main(run_id: str) -> None:
    """For each announcement on stdin: fetch it, tell its version and digest, or the error."""
    subscriber = Subscriber(run_id, token="key", timeout_s=1.0)
    for line in sys.stdin:
        subscriber.start(Announcement.model_validate_json(line))
        try:
            staged = subscriber.wait(20.0)
        except PeerLostError as error:
            tell(lost=str(error))
            continue
        if staged is None:
            tell(superseded=subscriber.num_superseded)
            continue
        tell(version=staged.version, digest=digest(list(staged.tensors())))
        staged.release()
    subscriber.close()


def rank_main(rank: str, store: str) -> None:
    """One of two FSDP2 ranks: take a snapshot, tell its digest and that of the unsharded model."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    torch.manual_seed(0)
    model = Model()
    whole = [(name, tensor.detach().clone()) for name, tensor in named_weights(model)]
    expected = digest([(n, t.bfloat16() if t.is_floating_point() else t) for n, t in whole])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    buffers = HostBuffers(HostBuffer) if rank == "0" else None
    snapshot = Snapshotter(named_weights(model), dtype="bfloat16", buffers=buffers).take(0)
    if snapshot is None:
        tell(kept=False)
    else:
        views = tensor_views(memoryview(snapshot.buffer.mapping), snapshot.tensors)
        tell(kept=True, digest=digest(list(views)), expected=expected)
    dist.destroy_process_group()


class Process:
    """One of the mains above; JSON lines out, lines in."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.process.test_weight_path", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> dict[str, object]:
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()
        return self.read()

    def read(self) -> dict[str, object]:
        return json.loads(self.popen.stdout.readline())

    def finish(self) -> int:
        self.popen.stdin.close()
        return self.popen.wait(20)


@contextmanager
def running(*arguments: str) -> Iterator[Process]:
    process = Process(*arguments)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()
        process.popen.stdin.close()
        process.popen.stdout.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_five_versions_arrive_and_a_killed_learner_is_noticed(transport):
    run_id = f"test-{uuid.uuid4().hex}"
    with (
        running("learner", run_id, transport) as learner,
        running("generator", run_id) as generator,
    ):
        digests = []
        for version in range(5):
            digests.append(learner.ask(str(version))["digest"])
            announcement = learner.read()["announcement"]
            got = generator.ask(json.dumps(announcement))
            assert got == {"version": version, "digest": digests[-1]}
        assert len(set(digests)) == 5

        learner.ask("5")
        announcement = learner.read()["announcement"]
        learner.popen.send_signal(signal.SIGKILL)
        learner.popen.wait(20)
        if transport == "tcp":
            lost = str(generator.ask(json.dumps(announcement))["lost"])
            assert "version 5" in lost
            assert announcement["endpoint"] in lost
        else:
            # Two served versions with their manifests and one free buffer outlive the kill.
            assert len(remove_leftovers(run_id)) == 5
            assert generator.ask(json.dumps(announcement)) == {"superseded": 1}
        assert generator.finish() == 0
    assert list(SHM_DIR.glob(f"asyncrl-{run_id}-*")) == []


def test_weights_sharded_over_two_ranks_are_published_whole_by_the_first(tmp_path):
    store = str(tmp_path / "store")
    with running("rank", "0", store) as first, running("rank", "1", store) as second:
        assert second.read() == {"kept": False}
        got = first.read()
        assert got["kept"]
        assert got["digest"] == got["expected"]
        assert (first.finish(), second.finish()) == (0, 0)


if __name__ == "__main__":
    mains = {"learner": learner_main, "generator": generator_main, "rank": rank_main}
    mains[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    if sys.argv[1] == "rank":
        os._exit(0)  # as asyncrl.cli: a thread of gloo may make the ordinary end an abort
