"""Versions staged by several workers while something goes wrong: found, named, and never adopted."""

import gc
import random
import socket
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from asyncrl.errors import PeerLostError, WeightMismatchError
from asyncrl.generator import shard_server, shard_staging
from asyncrl.generator.shard_staging import ShardedStaging, address_of
from asyncrl.weights.device_digests import DeviceDigester
from asyncrl.weights.digests import digest_chunks
from tests.unit.test_shard_staging import (
    CPU,
    Half,
    assert_has,
    upload,
    version,
    worker_of,
)
from tests.unit.test_staging import fetched_of

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class Whole(nn.Module):
    """A worker that takes all of every tensor."""

    def __init__(self, tensors):
        super().__init__()
        self.values = nn.ParameterDict(
            {n: nn.Parameter(torch.ones_like(t), requires_grad=False) for n, t in tensors}
        )

    def load_weights(self, weights):
        for name, values in weights:
            self.values[name].data.copy_(values)


@contextmanager
def staging_with(models, **options):
    """A staging, and a worker for each model; nothing is loaded yet."""
    staging = ShardedStaging(len(models), **options)
    workers = [worker_of(model, rank, staging.directory) for rank, model in enumerate(models)]
    staging.connect()
    try:
        yield staging, workers
    finally:
        staging.close()
        for worker in workers:
            worker.server._thread.join(10)


@contextmanager
def halves(**options):
    with staging_with([Half(0), Half(1)], **options) as (staging, workers):
        for worker in workers:
            worker.loader.load(dict(version(1)))
        yield staging, workers


@contextmanager
def unanswering(monkeypatch, answer=b"", **options):
    """A staging with one worker, which reads nothing and says `answer`; its end of the connection too."""
    monkeypatch.setattr(shard_staging, "_ANSWER_S", 0.2)
    staging = ShardedStaging(1, **options)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address_of(staging.directory, 0))
        listener.listen(1)
        staging.connect()
        with listener.accept()[0] as accepted:
            accepted.sendall(answer)
            yield staging, accepted
    staging.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_flip_in_any_chunk_is_found_whatever_the_layout_and_the_shares(seed, monkeypatch):
    """One to five workers, one to some twenty chunks: less than there are workers, too."""
    draw = random.Random(seed)
    shapes = [(draw.randrange(1, 9), draw.randrange(1, 40)) for _ in range(draw.randrange(1, 6))]
    tensors = [(f"t{index}", torch.randn(shape)) for index, shape in enumerate(shapes)]
    fetched = fetched_of(tensors, chunk_bytes=draw.choice([64, 100, 256, 999, 5000]))
    manifest, memory = fetched.manifest, fetched.block.memory
    chunks = [bytes(memory[slice(*manifest.chunk_range(i))]) for i in range(manifest.num_chunks)]
    digested = Counter()

    def noting(buffer, chunk_bytes, kind):
        digested.update(
            bytes(buffer[at : at + chunk_bytes]) for at in range(0, len(buffer), chunk_bytes)
        )
        return digest_chunks(buffer, chunk_bytes, kind)

    monkeypatch.setattr(shard_server, "digest_chunks", noting)
    with staging_with([Whole(tensors) for _ in range(seed % 5 + 1)]) as (staging, workers):
        for worker in workers:
            worker.loader.load({name: torch.ones_like(values) for name, values in tensors})
        assert staging.upload(fetched, is_verified=False)
        assert digested == Counter(chunks)  # each of them once
        for index in range(manifest.num_chunks):
            place = draw.randrange(*manifest.chunk_range(index))
            memory[place] ^= 1 << draw.randrange(8)
            with pytest.raises(WeightMismatchError, match=f"chunk {index} of {len(chunks)} in"):
                staging.upload(fetched, is_verified=False)
            memory[slice(*manifest.chunk_range(index))] = chunks[index]
        assert staging.upload(fetched, is_verified=False)
        for worker in workers:
            worker.server.load(staging.number)
            for name, values in tensors:
                assert torch.equal(worker.model.values[name], values)


def test_what_is_written_over_while_a_worker_still_copies_is_found(monkeypatch):
    """In the share of a worker that has copied already; the other takes it up with its own part."""
    answered = threading.Event()
    with halves() as (staging, workers):
        fetched = fetched_of(version(2), chunk_bytes=256)
        answer, stage = staging._answer, workers[1].server._stage

        def noting(rank):
            found = answer(rank)
            answered.set()
            return found

        def late(request):
            assert answered.wait(10)  # by the other, who is asked first
            fetched.block.memory[200] ^= 1  # of q's rows 4 to 8
            return stage(request)

        monkeypatch.setattr(staging, "_answer", noting)
        monkeypatch.setattr(workers[1].server, "_stage", late)
        with pytest.raises(WeightMismatchError, match="version 7: chunk 0 of 4 in"):
            staging.upload(fetched, is_verified=False)


def test_a_worker_that_is_late_is_named_so_and_its_answer_is_not_taken_for_another(monkeypatch):
    monkeypatch.setattr(shard_staging, "_ANSWER_S", 0.5)
    go_on = threading.Event()
    with halves() as (staging, workers):
        stage = workers[1].server._stage
        monkeypatch.setattr(
            workers[1].server, "_stage", lambda request: go_on.wait(10) and stage(request)
        )
        late = "worker 1 of the engine did not stage a version within 0.5 s"
        fetched = fetched_of(version(2))
        with pytest.raises(PeerLostError, match=late):
            staging.upload(fetched, is_verified=True)
        go_on.set()
        assert staging._connections[1].poll(10)  # "staged": version 2
        with pytest.raises(PeerLostError, match=late):  # not what a later failure would be called
            upload(staging, 3, is_verified=True)
        assert staging.number == 1  # not asked any more


@pytest.mark.parametrize(
    "answer", [b"", b"\0", b"\0\0\1\0" + bytes(10)], ids=["none", "head", "body"]
)
def test_no_answer_and_half_of_one_are_not_waited_for_for_ever(monkeypatch, answer):
    late = "worker 0 of the engine did not stage a version within 0.2 s"
    with unanswering(monkeypatch, answer) as (staging, _), pytest.raises(PeerLostError, match=late):
        staging.upload(fetched_of(version(2)), is_verified=True)


@pytest.mark.parametrize(
    "answer", [b"", b"\0", b"\0\0\1\0" + bytes(10)], ids=["none", "head", "body"]
)
def test_a_worker_that_ends_in_the_middle_of_an_answer_is_named(monkeypatch, answer):
    with unanswering(monkeypatch, answer) as (staging, accepted):
        accepted.shutdown(socket.SHUT_WR)
        with pytest.raises(
            PeerLostError, match="worker 0 of the engine does not stage versions any"
        ):
            staging.upload(fetched_of(version(2)), is_verified=True)


def test_a_worker_gives_back_its_digesters_memory_if_another_can_never_stage(monkeypatch):
    with halves() as (staging, workers):
        server = workers[1].server  # which digests the one chunk
        server._digester = DeviceDigester(CPU)
        assert upload(staging, 2)
        assert len(server._digester._words) > 0
        monkeypatch.setattr(workers[0].server, "_stage", lambda _: "never")
        assert upload(staging, 3) is None
        server._thread.join(10)
        assert not server._thread.is_alive()
        assert server._digester is None


@pytest.mark.parametrize("kind", ["folded", "sha256"])
def test_a_device_digests_shares_and_a_worker_without_one_goes_on(kind):
    """Of one chunk the first worker has none."""
    with halves() as (staging, workers):
        for worker in workers:
            worker.server._digester = DeviceDigester(CPU)
        fetched = fetched_of(version(2), kind=kind)
        assert fetched.manifest.num_chunks == 1
        for _ in range(2):
            assert staging.upload(fetched, is_verified=False)
        fetched.block.memory[7] ^= 1
        with pytest.raises(WeightMismatchError, match="version 7: chunk 0 of 1 in"):
            staging.upload(fetched, is_verified=False)


def test_only_the_version_that_was_staged_last_can_be_loaded_and_takes_no_more_memory():
    with halves() as (staging, workers):
        shards, numbers = [], []
        for each in (2, 3):
            assert upload(staging, each)
            shards.append([worker.server._shard for worker in workers])
            numbers.append(staging.number)
        assert shards[0] == shards[1]  # a part's memory, once for all versions
        for worker in workers:
            with pytest.raises(WeightMismatchError, match="staged as number 1, this worker has 2"):
                worker.server.load(numbers[0])
            assert_has(worker, 1)


def test_a_guard_may_say_more_of_a_lost_worker(monkeypatch):
    """As engine_workers.py does; what is wrong with a version does not concern it."""
    seen = []

    @contextmanager
    def guard():
        try:
            yield
        except PeerLostError as error:
            seen.append(error)
            raise PeerLostError("killed by SIGKILL") from error

    fetched = fetched_of(version(2))
    with unanswering(monkeypatch, guard=guard) as (staging, accepted):
        accepted.shutdown(socket.SHUT_WR)
        for _ in range(2):
            with pytest.raises(PeerLostError, match="killed by SIGKILL"):
                staging.upload(fetched, is_verified=True)
    [first, second] = seen
    assert first is second
    fetched.block.memory[7] ^= 1
    with halves(guard=guard) as (staging, _), pytest.raises(WeightMismatchError):
        staging.upload(fetched, is_verified=False)
    assert len(seen) == 2


def test_no_folder_is_left_if_nobody_ever_listened():
    staging = ShardedStaging(2)
    assert Path(staging.directory).is_dir()
    staging.close()
    assert not Path(staging.directory).exists()


def test_a_long_name_for_temporary_files_does_not_matter(tmp_path, monkeypatch):
    """An address of a socket has at most 107 bytes."""
    folder = tmp_path / ("x" * 107)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with halves() as (staging, _):
        assert upload(staging, 2)


def test_no_descriptor_is_left():
    def num_open():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    def live():
        with halves() as (staging, _):
            assert upload(staging, 2)
            assert upload(staging, 3)

    before = num_open()
    live()
    assert num_open() == before
