"""Staging on a device, here the CPU: whole, checked, and never under a view that is in use."""

import fcntl
import gc
import re
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.digests import digest_chunks
from asyncrl.weights.fetched import Fetched
from asyncrl.weights.manifest import DTYPE_NAMES, Manifest, lay_out, tensor_views
from asyncrl.weights.shared_file import memory_file
from asyncrl.weights.snapshot_files import SnapshotFiles
from asyncrl.weights.staging import DeviceStaging
from tests.unit.weight_peers import (
    TRANSPORTS,
    WAIT_S,
    bits,
    fetch,
    fill,
    generating,
    learning,
    odd_tensors,
)

CPU = torch.device("cpu")


def fetched_of(tensors, *, chunk_bytes=1000, kind="folded"):
    specs, num_bytes = lay_out([(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors])
    block = memory_file(num_bytes)
    memory = memoryview(block.memory)
    for (_, view), (_, values) in zip(tensor_views(memory, specs), tensors, strict=True):
        view.copy_(values)
    manifest = Manifest(
        run_id="run", epoch=1, version=7, tensors=specs, total_bytes=num_bytes,
        chunk_bytes=chunk_bytes, digest_kind=kind,
        chunk_digests=digest_chunks(memory, chunk_bytes, kind),
    )  # fmt: skip
    return Fetched(manifest, block)


def mappings(folder):
    """How often this process maps each file of `folder`, by inode."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return Counter(ln[4] for ln in lines if len(ln) == 6 and ln[5].startswith(str(folder)))


def is_free(path):
    """Whether the learner could write to the file: nobody has it locked."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def resident_kb(block):
    """How much of a mapped memory file is in memory, as the kernel says."""
    place = rf" {block.file.identity[1]} +/memfd:asyncrl-weights .*?^Rss: +(\d+) kB"
    return int(re.search(place, Path("/proc/self/smaps").read_text(), re.DOTALL | re.MULTILINE)[1])


def test_mapping_a_file_fetches_none_of_its_pages():
    block = memory_file(2**20)
    assert resident_kb(block) == 0
    block.memory[0] = 1
    assert resident_kb(block) > 0


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 18_000), st.sampled_from(["folded", "sha256"]))
def test_every_tensor_is_whole_whatever_the_size_of_a_chunk(seed, chunk_bytes, kind):
    tensors = odd_tensors(seed)
    fetched = fetched_of(tensors, chunk_bytes=chunk_bytes, kind=kind)
    staged = DeviceStaging(CPU).upload(fetched, is_verified=False)
    assert [(name, bits(t)) for name, t in staged] == [(name, bits(t)) for name, t in tensors]
    assert [(t.shape, t.dtype) for _, t in staged] == [(t.shape, t.dtype) for _, t in tensors]


@pytest.mark.parametrize("kind", ["folded", "sha256"])
@pytest.mark.parametrize(("place", "chunk"), [(0, 0), (9999, 0), (10_000, 1), (79_999, 7)])
def test_a_changed_bit_is_found_in_the_copy(kind, place, chunk):
    fetched = fetched_of([("weight", torch.randn(20_000))], chunk_bytes=10_000, kind=kind)
    fetched.block.memory[place] ^= 4
    staging = DeviceStaging(CPU)
    with pytest.raises(WeightMismatchError, match=f"version 7: chunk {chunk} of 8 in"):
        staging.upload(fetched, is_verified=False)
    assert staging.upload(fetched, is_verified=True)  # what was checked as it came is not again
    fetched.block.memory[place] ^= 4
    assert staging.upload(fetched, is_verified=False)


def test_one_buffer_serves_all_versions_of_a_size_and_grows_for_another():
    staging = DeviceStaging(CPU)
    places = []
    for size in (1000, 1000, 2000):
        weight = fill(torch.empty(size), size)
        [(_, staged)] = staging.upload(fetched_of([("weight", weight)]), is_verified=False)
        assert torch.equal(staged, weight)
        places.append(staged.data_ptr())
    assert places[0] == places[1]


def test_another_layout_of_the_same_size_is_staged_as_such():
    staging = DeviceStaging(CPU)
    one = [("a", torch.randn(16)), ("b", torch.randn(32))]
    two = [("a", torch.randn(4, 8)), ("c", torch.randn(16))]
    views = []
    for tensors in (one, one, two, one):
        found = staging.upload(fetched_of(tensors), is_verified=False)
        assert [(name, bits(t)) for name, t in found] == [(name, bits(t)) for name, t in tensors]
        views.append([tensor for _, tensor in found])
        found.clear()  # it is the caller's
    assert all(first is second for first, second in zip(views[0], views[1], strict=True))


def test_the_memory_of_another_size_is_given_back_before_more_is_taken(monkeypatch):
    staging = DeviceStaging(CPU)
    [(_, staged)] = staging.upload(fetched_of([("weight", torch.ones(1000))]), is_verified=False)
    before = weakref.ref(staged)
    del staged
    left = []

    def full(*_, **__):
        left.append(before())
        raise torch.OutOfMemoryError("CUDA out of memory")

    larger = fetched_of([("weight", torch.ones(2000))])
    monkeypatch.setattr(torch, "empty", full)
    assert staging.upload(larger, is_verified=False) is None
    assert left == [None]


def test_each_file_is_mapped_once_and_free_for_the_learner_once_it_is_copied(tmp_path):
    weight = torch.empty(1000)
    with generating(tmp_path, staging=DeviceStaging(CPU)) as subscriber:
        for epoch in (1, 2):
            with learning([("weight", weight)], tmp_path, "shm", epoch=epoch) as learner:
                inodes = set()
                for version in range(8):
                    fill(weight, version)
                    announcement = learner.publish(version)
                    inodes.add(Path(announcement.endpoint).stat().st_ino)
                    staged = fetch(subscriber, announcement)
                    ((_, got),) = staged.tensors()
                    assert torch.equal(got, weight)
                    staged.release()
                # A reader's lock would have made the learner delete a file for every version.
                assert len(inodes) == 3
                gc.collect()  # the learner before
                times = mappings(tmp_path)
                assert {int(inode) for inode in times} == inodes
                assert set(times.values()) == {2}  # the learner, and we


def test_a_file_is_locked_while_it_is_copied_and_no_longer_also_if_that_fails(tmp_path):
    files = SnapshotFiles("run", shm_dir=tmp_path, max_total_bytes=2**20)
    with learning([("weight", torch.zeros(1000))], tmp_path, "shm") as learner:
        announcement = learner.publish(0)
        path = Path(announcement.endpoint)
        assert is_free(path)
        blocks = []

        def fail(fetched):
            blocks.append(fetched.block)
            assert not is_free(path)
            raise WeightMismatchError("in the copy")

        with pytest.raises(WeightMismatchError), files.shared(announcement) as fetched:
            fail(fetched)
        assert is_free(path)
        with files.shared(announcement) as fetched:
            assert [fetched.block] == blocks  # pinned once
            assert not is_free(path)
        assert is_free(path)


def test_a_page_changed_behind_the_learners_back_is_found_in_the_copy(tmp_path):
    with (
        learning([("weight", torch.zeros(1000))], tmp_path, "shm") as learner,
        generating(tmp_path, staging=DeviceStaging(CPU)) as subscriber,
    ):
        announcement = learner.publish(0)
        with Path(announcement.endpoint).open("r+b") as file:
            file.seek(2100)
            file.write(b"x")
        subscriber.start(announcement)
        with pytest.raises(WeightMismatchError, match="version 0: chunk 2 of 5 in"):
            subscriber.wait(WAIT_S)


def test_nothing_stays_mapped_after_the_end(tmp_path):
    with learning([("weight", torch.zeros(1000))], tmp_path, "shm") as learner:
        with generating(tmp_path, staging=DeviceStaging(CPU)) as subscriber:
            for version in range(4):
                fetch(subscriber, learner.publish(version)).release()
            assert set(mappings(tmp_path).values()) == {2}  # the learner, and we
        assert set(mappings(tmp_path).values()) == {1}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_staged_weights_are_not_overwritten_before_their_release(transport, tmp_path):
    weight = torch.empty(1000)
    with (
        learning([("weight", weight)], tmp_path, transport) as learner,
        generating(tmp_path, staging=DeviceStaging(CPU)) as subscriber,
    ):
        fill(weight, 0)
        staged = fetch(subscriber, learner.publish(0))
        fill(weight, 1)
        subscriber.start(learner.publish(1))
        assert subscriber.wait(0.2) is None  # the only staging buffer is held
        ((_, got),) = staged.tensors()
        assert torch.equal(got, fill(torch.empty(1000), 0))
        staged.release()
        with pytest.raises(ValueError, match="released"):
            staged.tensors()
        following = subscriber.wait(WAIT_S)
        assert following.version == 1
        ((_, got),) = following.tensors()
        assert torch.equal(got, fill(torch.empty(1000), 1))


@pytest.mark.parametrize(
    ("place", "name"),
    [(torch, "empty"), (torch.Tensor, "sum")],
    ids=["for the copy", "for its digests"],
)
def test_weights_stay_in_host_memory_when_the_device_has_no_room(
    place, name, tmp_path, monkeypatch, caplog
):
    weight = fill(torch.empty(4000), 3)
    staging = DeviceStaging(CPU)

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with (
        learning([("weight", weight)], tmp_path, "shm", chunk_bytes=10_000) as learner,
        generating(tmp_path, staging=staging) as subscriber,
    ):
        announcement = learner.publish(0)
        with monkeypatch.context() as patch:
            patch.setattr(place, name, out_of_memory)
            staged = fetch(subscriber, announcement)
        assert len(staging._buffer) == 0  # what it got of the device's memory is given back
        ((_, got),) = staged.tensors()
        expected = weight.clone()
        for version in range(1, 5):  # more than the learner has files
            fill(weight, 10 + version)
            announcement = learner.publish(version)
        assert torch.equal(got, expected)
        staged.release()
        fetch(subscriber, announcement)  # not tried again, and not said again
    assert caplog.text.count("no room to stage 16000 bytes") == 1  # whole lines of 64
