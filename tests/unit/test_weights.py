"""The weight path from publish to staged tensors, over both transports."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import PeerLostError, ProtocolError
from asyncrl.weights.manifest import Probe
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.snapshot import Snapshotter
from asyncrl.weights.snapshot_files import lock_for_reading
from asyncrl.wire import messages
from tests.unit.weight_peers import (
    TRANSPORTS,
    WAIT_S,
    Learner,
    bits,
    fetch,
    fill,
    generating,
    learning,
    odd_tensors,
)

# round trips


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("chunk_bytes", [1000, 1, 2**20])
def test_every_dtype_and_shape_arrives_bit_exact(transport, chunk_bytes, tmp_path):
    tensors = odd_tensors(1) if chunk_bytes > 1 else odd_tensors(1)[:10]
    with (
        learning(tensors, tmp_path, transport, chunk_bytes=chunk_bytes) as learner,
        generating(tmp_path) as subscriber,
    ):
        staged = fetch(subscriber, learner.publish(0))
        got = [(name, bits(tensor)) for name, tensor in staged.tensors()]
        assert got == [(name, bits(tensor)) for name, tensor in tensors]
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from(TRANSPORTS), st.integers(64, 5000))
def test_random_bits_survive_any_chunk_size(tmp_path_factory, seed, transport, chunk_bytes):
    directory = tmp_path_factory.mktemp("shm")
    tensors = odd_tensors(seed)
    with (
        learning(tensors, directory, transport, chunk_bytes=chunk_bytes) as learner,
        generating(directory, chunks_in_flight=3) as subscriber,
    ):
        staged = fetch(subscriber, learner.publish(0))
        assert [bits(t) for _, t in staged.tensors()] == [bits(t) for _, t in tensors]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_the_learner_does_after_publish_does_not_reach_the_reader(transport, tmp_path):
    weight = torch.empty(25_000)  # 100 kB
    with (
        learning([("weight", weight)], tmp_path, transport, chunk_bytes=2**14) as learner,
        generating(tmp_path) as subscriber,
    ):
        for version in range(200):
            expected = fill(weight, version).clone()
            learner.publish_only(version)
            weight.fill_(float("nan"))  # while the digester and the server still work on it
            staged = fetch(subscriber, learner.announcement())
            ((_, got),) = staged.tensors()
            assert torch.equal(got, expected), version
            staged.release()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_work_in_place_on_received_weights_stays_with_this_reader(transport, tmp_path):
    weight = torch.ones(100)
    with (
        learning([("weight", weight)], tmp_path, transport) as learner,
        generating(tmp_path) as one,
        generating(tmp_path) as other,
    ):
        announcement = learner.publish(0)
        for _, tensor in fetch(one, announcement).tensors():
            tensor.mul_(5)
        ((_, seen),) = fetch(other, announcement).tensors()
        assert torch.equal(seen, weight)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_the_learner_says_of_a_fixed_sequence_arrives_bit_exact(transport, tmp_path):
    values = [float(value) for value in np.float32([-1 / 3, -2e-7])]
    probe = Probe(tokens=[5, 2**31 - 1, 0], first_logprobs=values, logprobs=values[::-1])
    tensors = [("a", torch.ones(3))]
    with learning(tensors, tmp_path, transport) as learner, generating(tmp_path) as subscriber:
        staged = fetch(subscriber, learner.publish(0, probe=probe))
        assert staged.probe == probe
        staged.release()
        staged = fetch(subscriber, learner.publish(1))
        assert staged.probe is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_fetch_is_under_way_from_its_start_until_its_end_is_told(transport, tmp_path):
    ended = threading.Event()
    with (
        learning([("weight", torch.ones(100))], tmp_path, transport) as learner,
        generating(tmp_path, on_change=ended.set) as subscriber,
    ):
        assert not subscriber.is_fetching
        first, second = learner.publish(0), learner.publish(1)
        subscriber.start(first)
        assert ended.wait(WAIT_S)
        assert not subscriber.is_fetching
        ended.clear()
        staged = subscriber.ready()
        subscriber.start(second)
        if transport == "tcp":  # one staging buffer: the second waits for the first one's release
            assert subscriber.is_fetching
            assert not ended.is_set()
        staged.release()
        assert ended.wait(WAIT_S)
        assert not subscriber.is_fetching
        assert subscriber.ready().version == 1


def test_weights_cannot_be_read_after_their_release(tmp_path):
    with (
        learning([("weight", torch.ones(3))], tmp_path, "shm") as learner,
        generating(tmp_path) as subscriber,
    ):
        staged = fetch(subscriber, learner.publish(0))
        staged.release()
        staged.release()
        with pytest.raises(ValueError, match="released"):
            staged.tensors()


# versions come and go


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_versions_live_and_the_third_removes_the_first(transport, tmp_path):
    weight = torch.empty(1000)
    with learning([("weight", weight)], tmp_path, transport) as learner:
        announcements = []
        for version in range(3):
            fill(weight, version)
            announcements.append(learner.publish(version))
        for version in (1, 2):
            with generating(tmp_path) as subscriber:
                staged = fetch(subscriber, announcements[version])
                ((_, got),) = staged.tensors()
                assert torch.equal(got, fill(torch.empty(1000), version))
        with generating(tmp_path) as late:
            late.start(announcements[0])
            assert late.wait(WAIT_S) is None
            assert late.num_superseded == 1
            late.start(announcements[0])  # gone is gone
            assert late.wait(WAIT_S) is None
            assert late.num_superseded == 1
            assert fetch(late, announcements[2]).version == 2


def test_a_reader_keeps_its_bytes_however_many_versions_follow(tmp_path):
    weight = torch.empty(1000)
    with (
        learning([("weight", weight)], tmp_path, "shm") as learner,
        generating(tmp_path) as subscriber,
    ):
        fill(weight, 0)
        staged = fetch(subscriber, learner.publish(0))
        for version in range(1, 9):
            fill(weight, version)
            learner.publish(version)
            ((_, got),) = staged.tensors()
            assert torch.equal(got, fill(torch.empty(1000), 0)), version
        assert len(list(tmp_path.glob("*.manifest"))) == 2
        assert len(list(tmp_path.iterdir())) <= 3 + 2  # buffers, manifests
        staged.release()
        # `got` is still a view of it: the pages stay locked, and right.
        fill(weight, 9)
        learner.publish(9)
        assert torch.equal(got, fill(torch.empty(1000), 0))


def test_memory_is_written_again_once_no_reader_maps_it(tmp_path):
    weight = torch.empty(1000)
    with (
        learning([("weight", weight)], tmp_path, "shm") as learner,
        generating(tmp_path) as subscriber,
    ):
        inodes = set()
        for version in range(9):
            fill(weight, version)
            announcement = learner.publish(version)
            fetch(subscriber, announcement).release()
            inodes.add(Path(announcement.endpoint).stat().st_ino)
        assert len(inodes) == 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_piles_up_over_many_versions(transport, tmp_path):
    weight = torch.empty(1000)
    counts = []
    with (
        learning([("weight", weight)], tmp_path, transport) as learner,
        generating(tmp_path) as subscriber,
    ):
        for version in range(100):
            staged = fetch(subscriber, learner.publish(version))
            if version % 3 or transport == "tcp":  # with shm every third is dropped unreleased
                staged.release()
            if version in (9, 99):
                files = len(list(tmp_path.iterdir()))
                counts.append((files, len(list(Path("/proc/self/fd").iterdir()))))
    files, descriptors = zip(*counts, strict=True)
    assert files[0] == files[1]
    assert descriptors[1] <= descriptors[0]  # others of this process may have gone meanwhile


def test_a_file_that_lost_its_name_after_it_was_opened_counts_as_retired(tmp_path):
    path = tmp_path / "asyncrl-run-1-0"
    path.write_bytes(b"old")
    with path.open("rb") as file:
        assert lock_for_reading(file.fileno(), path)
        path.rename(tmp_path / "asyncrl-run-1-1.free")
        assert not lock_for_reading(file.fileno(), path)
        path.write_bytes(b"new")
        assert not lock_for_reading(file.fileno(), path)


def test_a_version_whose_file_is_gone_counts_as_retired(tmp_path):
    with (
        learning([("weight", torch.ones(100))], tmp_path, "shm") as learner,
        generating(tmp_path) as subscriber,
    ):
        announcement = learner.publish(0)
        Path(announcement.endpoint).rename(tmp_path / "elsewhere")
        subscriber.start(announcement)
        assert subscriber.wait(WAIT_S) is None
        assert subscriber.num_superseded == 1
        (tmp_path / "elsewhere").rename(announcement.endpoint)


def test_staged_weights_are_not_overwritten_before_their_release(tmp_path):
    weight = torch.empty(1000)
    with (
        learning([("weight", weight)], tmp_path, "tcp") as learner,
        generating(tmp_path) as subscriber,
    ):
        fill(weight, 0)
        staged = fetch(subscriber, learner.publish(0))
        fill(weight, 1)
        subscriber.start(learner.publish(1))
        assert subscriber.wait(0.2) is None  # the only staging buffer is held
        ((_, got),) = staged.tensors()
        assert torch.equal(got, fill(torch.empty(1000), 0))
        staged.release()
        assert subscriber.wait(WAIT_S).version == 1


def test_who_cannot_adopt_lets_go_of_a_version_for_a_newer_one(tmp_path):
    weight = torch.empty(1000)
    with (
        learning([("weight", weight)], tmp_path, "tcp") as learner,
        generating(tmp_path, on_change=(fetched := threading.Semaphore(0)).release) as subscriber,
    ):
        for version in range(2):
            fill(weight, version)
            subscriber.start(learner.publish(version))
            if version == 0:
                assert fetched.acquire(timeout=WAIT_S)
                subscriber.prefer_newest()  # it is the newest
                assert subscriber.num_superseded == 0
        assert subscriber.is_fetching  # the only staging buffer has version 0, which nobody took
        subscriber.prefer_newest()
        staged = subscriber.wait(WAIT_S)
        assert (staged.version, subscriber.num_superseded) == (1, 1)
        ((_, got),) = staged.tensors()
        assert torch.equal(got, fill(torch.empty(1000), 1))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_processes_read_a_version_from_its_file_as_long_as_it_is_held(transport, tmp_path):
    weight, flag = fill(torch.empty(1000), 7), torch.tensor([True])
    with (
        learning([("weight", weight), ("flag", flag)], tmp_path, transport) as learner,
        generating(tmp_path) as subscriber,
    ):
        staged = fetch(subscriber, learner.publish(0))
        fill(weight, 8)
        for version in range(1, 4):  # the publisher has none of its names any more
            learner.publish(version)
        [first, second] = staged.file.tensors
        read = f"import sys; sys.stdout.buffer.write(open({staged.file.path!r}, 'rb').read())"
        data = subprocess.run([sys.executable, "-c", read], capture_output=True, check=True).stdout
        assert [first.name, second.name] == ["weight", "flag"]
        values = data[first.offset : first.offset + first.num_bytes]
        assert values == fill(torch.empty(1000), 7).numpy().tobytes()
        assert data[second.offset : second.offset + second.num_bytes] == b"\1"
        staged.release()
        assert staged.file is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_older_announcement_is_refused(transport, tmp_path):
    with (
        learning([("weight", torch.ones(3))], tmp_path, transport, epoch=4) as learner,
        generating(tmp_path) as subscriber,
    ):
        announcement = learner.publish(7)
        fetch(subscriber, announcement).release()
        for older in ({"version": 6}, {"epoch": 3, "version": 9}):
            with pytest.raises(ProtocolError, match="names must rise"):
                subscriber.start(announcement.model_copy(update=older))
        subscriber.start(announcement)  # what is held already is not fetched again
        assert subscriber.wait(WAIT_S) is None
        assert subscriber.num_superseded == 0


# the publisher's own failures


def test_an_error_of_the_thread_is_raised_by_the_next_publish_and_by_close(tmp_path):
    def refuse(announcement: messages.Announcement) -> None:
        raise PeerLostError(f"no broker for version {announcement.version}")

    publisher = Publisher("run", epoch=1, transport="shm", on_published=refuse, shm_dir=tmp_path)
    snapshotter = Snapshotter([("a", torch.ones(3))], dtype=None, buffers=publisher.buffers)
    snapshots = [snapshotter.take(0), snapshotter.take(1)]
    publisher.publish(snapshots[0])
    with pytest.raises(PeerLostError, match="version 0"):
        publisher.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PeerLostError, match="version 0"):
        publisher.publish(snapshots[1])


def test_a_name_that_is_taken_in_shared_memory_is_an_error_not_a_replacement(tmp_path):
    learner = Learner([("weight", torch.ones(3))], tmp_path, "shm")
    (tmp_path / "asyncrl-run-1-5").write_bytes(b"not ours")
    learner.publish_only(5)
    with pytest.raises(FileExistsError):
        learner.publisher.close()
    assert [path.name for path in tmp_path.iterdir()] == ["asyncrl-run-1-5"]
    assert (tmp_path / "asyncrl-run-1-5").read_bytes() == b"not ours"


def test_versions_must_rise(tmp_path):
    with learning([("weight", torch.ones(3))], tmp_path, "shm") as learner:
        learner.publish(4)
        with pytest.raises(ProtocolError, match="rise"):
            learner.publish_only(4)


def test_close_publishes_what_was_handed_over_and_says_that_it_is_final(tmp_path):
    with learning([("weight", torch.ones(3))], tmp_path, "shm") as learner:
        learner.publish_only(0)
        learner.publish_only(1, final=True)
        learner.publisher.close()
        assert [learner.announcement().final for _ in range(2)] == [False, True]
