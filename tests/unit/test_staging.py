"""Staging on a device, here the CPU: whole, in place, and never under a view that is in use."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.manifest import DTYPE_NAMES, lay_out, tensor_views
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


def snapshot_of(tensors):
    specs, num_bytes = lay_out([(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors])
    memory = bytearray(num_bytes)
    for (_, view), (_, values) in zip(tensor_views(memory, specs), tensors, strict=True):
        view.copy_(values)
    return memory, specs, num_bytes


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 3000))
def test_every_tensor_is_whole_whatever_the_size_of_a_bounce(seed, bounce_bytes):
    tensors = odd_tensors(seed)
    staging = DeviceStaging(CPU, bounce_bytes=bounce_bytes)
    staged = staging.upload(*snapshot_of(tensors))
    assert [(name, bits(t)) for name, t in staged] == [(name, bits(t)) for name, t in tensors]
    assert [(t.shape, t.dtype) for _, t in staged] == [(t.shape, t.dtype) for _, t in tensors]


def test_one_buffer_serves_all_versions_of_a_size_and_grows_for_another():
    staging = DeviceStaging(CPU)
    places = []
    for size in (1000, 1000, 2000):
        weight = fill(torch.empty(size), size)
        [(_, staged)] = staging.upload(*snapshot_of([("weight", weight)]))
        assert torch.equal(staged, weight)
        places.append(staged.data_ptr())
    assert places[0] == places[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_staged_weights_are_not_overwritten_before_their_release(transport, tmp_path):
    weight = torch.empty(1000)
    with (
        learning([("weight", weight)], tmp_path, transport) as learner,
        generating(tmp_path, staging=DeviceStaging(CPU, bounce_bytes=100)) as subscriber,
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


def test_weights_stay_in_host_memory_when_the_device_has_no_room(tmp_path, monkeypatch, caplog):
    weight = fill(torch.empty(1000), 3)
    staging = DeviceStaging(CPU)

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with (
        learning([("weight", weight)], tmp_path, "shm") as learner,
        generating(tmp_path, staging=staging) as subscriber,
    ):
        announcement = learner.publish(0)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", out_of_memory)
            staged = fetch(subscriber, announcement)
        ((_, got),) = staged.tensors()
        assert torch.equal(got, weight)
        staged.release()
        fetch(subscriber, learner.publish(1))  # not tried again, and not said again
    assert caplog.text.count("no room to stage 4032 bytes") == 1  # 4,000 in whole lines of 64
