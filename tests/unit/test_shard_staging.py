"""Parts of a version in several workers: each what its loader would take, and nothing before its time."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asyncrl.errors import PeerLostError, WeightMismatchError
from asyncrl.generator import shard_staging
from asyncrl.generator.shard_server import ShardServer, StagedShard
from asyncrl.generator.shard_staging import ShardedStaging, address_of
from asyncrl.generator.vllm_direct import DirectLoader
from asyncrl.weights.buffers import MAX_BUFFERS
from tests.unit.test_staging import fetched_of
from tests.unit.weight_peers import TRANSPORTS, fetch, generating, learning

CPU = torch.device("cpu")
WIDTH = 8


class Half(nn.Module):
    """One worker's part: of `up` rows, of `down` columns, all of `norm`; q and k lie in one matrix."""

    def __init__(self, rank, *, scale=1.0):
        super().__init__()
        half = WIDTH // 2
        self.qk = nn.Parameter(torch.full((2 * half, WIDTH), 0.5), requires_grad=False)
        self.down = nn.Parameter(torch.full((WIDTH, half), 0.5), requires_grad=False)
        self.norm = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self._rank, self._scale = rank, scale

    def load_weights(self, weights):
        half = WIDTH // 2
        for name, values in weights:
            match name:
                case "q" | "k":
                    rows = values.narrow(0, self._rank * half, half)
                    self.qk.data.narrow(0, half * (name == "k"), half).copy_(rows)
                case "down":
                    self.down.data.copy_(values.narrow(1, self._rank * half, half))
                case "norm":
                    self.norm.data.copy_(values if self._scale == 1.0 else values * self._scale)


def version(number):
    generator = torch.Generator().manual_seed(number)
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "down": (WIDTH, WIDTH), "norm": (WIDTH,)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def parts(model):
    return {name: values.clone() for name, values in model.state_dict().items()}


def expected(rank, number):
    """Cut by hand."""
    q, k, down, norm = (values for _, values in version(number))
    part = slice(4 * rank, 4 * rank + 4)
    return {"qk": torch.cat([q[part], k[part]]), "down": down[:, part], "norm": norm}


def assert_has(worker, number):
    for name, values in expected(worker.rank, number).items():
        assert torch.equal(worker.model.state_dict()[name], values), (worker.rank, name)


def new_worker(rank, directory, **options):
    return worker_of(Half(rank, **options), rank, directory)


def worker_of(model, rank, directory):
    loader = DirectLoader(model, model.load_weights, may_be_direct=True)
    server = ShardServer(address_of(directory, rank), loader, CPU)
    return SimpleNamespace(rank=rank, model=model, loader=loader, server=server)


@pytest.fixture
def staging():
    staging = ShardedStaging(2)
    yield staging
    staging.close()


@pytest.fixture
def workers(staging):
    workers = [new_worker(rank, staging.directory) for rank in range(2)]
    staging.connect()
    return workers


def upload(staging, number, **options):
    return staging.upload(fetched_of(version(number)), **({"is_verified": False} | options))


def test_the_first_version_comes_from_its_file_and_the_others_are_staged(staging, workers):
    assert upload(staging, 1) is None  # no worker has loaded anything yet
    for worker in workers:
        worker.loader.load(dict(version(1)))
        assert worker.loader.direct is True
    for number in (2, 3):
        found = upload(staging, number)
        assert [(n, t.shape, t.dtype, t.is_meta) for n, t in found] == [
            (n, t.shape, t.dtype, True) for n, t in version(number)
        ]
        for worker in workers:
            assert_has(worker, number - 1)  # what is computed with does not change yet
        for worker in workers:
            worker.server.load(staging.number)
            assert_has(worker, number)


def test_what_was_not_staged_is_not_loaded(staging, workers):
    for worker in workers:
        worker.loader.load(dict(version(1)))
    with pytest.raises(WeightMismatchError, match="number 1, this worker has 0"):
        workers[0].server.load(1)
    upload(staging, 2)
    with pytest.raises(WeightMismatchError, match="number 2, this worker has 1"):
        workers[0].server.load(2)
    for worker in workers:
        assert_has(worker, 1)


@pytest.mark.parametrize("chunk_bytes", [256, 4096])
@pytest.mark.parametrize("at", [0, 300, 800])
def test_a_changed_byte_is_found_and_the_next_version_is_staged(staging, workers, at, chunk_bytes):
    """832 bytes: of four chunks each worker digests two, of one chunk one of them all."""
    for worker in workers:
        worker.loader.load(dict(version(1)))
    spoiled = fetched_of(version(2), chunk_bytes=chunk_bytes)
    spoiled.block.memory[at] ^= 1
    found = f"chunk {at // chunk_bytes} of {1 if chunk_bytes == 4096 else 4}"
    with pytest.raises(WeightMismatchError, match=f"version 7: {found} in the learner's snapshot"):
        staging.upload(spoiled, is_verified=False)
    assert staging.upload(spoiled, is_verified=True)  # by who has fetched it
    assert upload(staging, 3)
    for worker in workers:
        worker.server.load(staging.number)
        assert_has(worker, 3)


def test_where_the_trial_fails_nothing_is_staged_ever(staging):
    workers = [
        new_worker(0, staging.directory),
        new_worker(1, staging.directory, scale=2.0),  # computes, so copies are not all of it
    ]
    staging.connect()
    for worker in workers:
        worker.loader.load(dict(version(1)))
    assert [worker.loader.direct for worker in workers] == [True, False]
    assert upload(staging, 2) is None
    number = staging.number
    assert upload(staging, 3) is None
    assert staging.number == number  # not even asked
    server = workers[0].server  # it could
    server._thread.join(10)
    assert not server._thread.is_alive()
    assert (server._shard, server._files) == (None, {})


def test_what_does_not_fit_is_left_to_the_engine_to_refuse(staging, workers):
    for worker in workers:
        worker.loader.load(dict(version(1)))
    assert upload(staging, 2)
    number = staging.number
    other = [(name, values) for name, values in version(3) if name != "down"]
    assert staging.upload(fetched_of(other), is_verified=False) is None
    with pytest.raises(WeightMismatchError, match="number 1, this worker has 0"):
        workers[0].server.load(number)  # the parts of version 2 may be overwritten
    assert upload(staging, 4)


@pytest.mark.parametrize("where", ["__init__", "fill"])
def test_without_room_versions_are_adopted_from_their_file(staging, workers, monkeypatch, where):
    for worker in workers:
        worker.loader.load(dict(version(1)))

    def no_room(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(StagedShard, where, no_room)
    assert upload(staging, 2) is None
    monkeypatch.undo()
    assert upload(staging, 3) is None
    assert [worker.server._shard for worker in workers] == [None, None]  # it holds no memory
    for worker in workers:
        assert_has(worker, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_thread_has_ended_is_named(staging, workers, monkeypatch):
    for worker in workers:
        worker.loader.load(dict(version(1)))

    def end(*_):
        raise SystemExit

    monkeypatch.setattr(workers[1].server, "_stage", end)
    fetched = fetched_of(version(2))
    for _ in range(2):  # while it is waited for, and for good
        with pytest.raises(PeerLostError, match="worker 1 of the engine does not stage"):
            staging.upload(fetched, is_verified=False)


def test_a_worker_that_takes_no_request_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(shard_staging, "_ANSWER_S", 0.2)
    staging = ShardedStaging(1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address_of(staging.directory, 0))
        listener.listen(1)
        staging.connect()
        # More than the system buffers of a socket (212,992 bytes, unless somebody has raised them).
        large = [(f"{number:04}" * 200, torch.zeros(1)) for number in range(10_000)]
        with pytest.raises(PeerLostError, match="worker 0 of the engine did not stage a version"):
            staging.upload(fetched_of(large), is_verified=True)
    staging.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_subscriber_stages_what_a_learner_publishes(tmp_path, staging, workers, transport):
    own = version(0)
    for worker in workers:
        worker.loader.load(dict(own))
    with (
        learning(own, tmp_path, transport) as learner,
        generating(tmp_path, staging=staging) as subscriber,
    ):
        for number in range(1, 7):
            for (_, mine), (_, values) in zip(own, version(number), strict=True):
                mine.copy_(values)
            staged = fetch(subscriber, learner.publish(number))
            assert staged.file is None
            assert all(values.is_meta for _, values in staged.tensors())
            for worker in workers:
                worker.server.load(staging.number)
                assert_has(worker, number)
            staged.release()
            assert len(workers[0].server._files) <= MAX_BUFFERS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_of_a_learner_that_has_ended_stays_mapped(tmp_path, staging, workers, transport):
    for worker in workers:
        worker.loader.load(dict(version(0)))
    files = []  # of every version's, while it was staged
    with generating(tmp_path, staging=staging) as subscriber:
        for epoch in (1, 2):
            with learning(version(epoch), tmp_path, transport, epoch=epoch) as learner:
                for number in range(1, 4):
                    fetch(subscriber, learner.publish(number)).release()
                    files.append(set(workers[0].server._files))
    if transport == "shm":  # each is pinned once
        assert files[1] > files[0]
        assert files[3].isdisjoint(files[2])
    else:
        assert all(len(each) == 1 for each in files)


def test_a_file_without_a_name_is_unmapped_when_another_comes(staging, workers):
    for worker in workers:
        worker.loader.load(dict(version(1)))
    first, second = fetched_of(version(2)), fetched_of(version(3))
    mapped = []
    for fetched in (first, first, second):
        assert staging.upload(fetched, is_verified=False)
        [(key, block)] = workers[0].server._files.items()
        assert key == fetched.block.file.identity
        mapped.append(block)
    assert mapped[0] is mapped[1]  # and pinned, once


def test_no_folder_is_left_to_who_is_killed(staging, workers):
    assert not Path(staging.directory).exists()
    staging.close()
    staging.close()
