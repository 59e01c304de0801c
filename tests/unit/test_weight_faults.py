"""The weight path against corrupt files, other runs and strangers."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from asyncrl.errors import ConfigError, ProtocolError, WeightMismatchError
from asyncrl.weights.subscriber import StagedWeights, Subscriber
from asyncrl.wire import messages
from asyncrl.wire.channel import Channel
from tests.unit.weight_peers import (
    TRANSPORTS,
    WAIT_S,
    Learner,
    fetch,
    generating,
    learning,
)

# corruption in shared memory


def test_one_wrong_byte_in_shared_memory_is_caught_wherever_it_is(tmp_path):
    weight = torch.ones(1000)  # 4000 bytes; with padding 4032 in five chunks of 1000
    with learning([("weight", weight)], tmp_path, "shm") as learner:
        for version, place in enumerate([0, 999, 1000, 2500, 4031]):
            announcement = learner.publish(version)
            with Path(announcement.endpoint).open("r+b") as file:
                file.seek(place)
                right = file.read(1)
                file.seek(place)
                file.write(bytes([right[0] ^ 1]))
            with generating(tmp_path) as subscriber:
                subscriber.start(announcement)
                with pytest.raises(WeightMismatchError, match=f"chunk {place // 1000} of 5"):
                    subscriber.wait(WAIT_S)
                assert subscriber.ready() is None
            with Path(announcement.endpoint).open("r+b") as file:  # padding is not rewritten
                file.seek(place)
                file.write(right)


def test_a_changed_manifest_or_a_shorter_file_is_caught(tmp_path):
    with learning([("weight", torch.ones(1000))], tmp_path, "shm") as learner:
        announcement = learner.publish(0)
        beside = Path(announcement.endpoint + ".manifest")
        data = beside.read_bytes()
        for change, reason in [
            (lambda: beside.write_bytes(data[:-1] + bytes([data[-1] ^ 1])), "manifest digest"),
            (lambda: beside.write_bytes(data), None),
            (lambda: os.truncate(announcement.endpoint, 4000), "4000 bytes"),
        ]:
            change()
            with generating(tmp_path) as subscriber:
                subscriber.start(announcement)
                if reason is None:
                    assert subscriber.wait(WAIT_S) is not None
                    continue
                with pytest.raises(WeightMismatchError, match=reason):
                    subscriber.wait(WAIT_S)
        os.truncate(announcement.endpoint, 4032)


def test_after_an_error_the_next_version_is_fetched(tmp_path):
    with (
        learning([("weight", torch.ones(10))], tmp_path, "shm") as learner,
        generating(tmp_path) as subscriber,
    ):
        subscriber.start(learner.publish(0).model_copy(update={"manifest_digest": "00" * 32}))
        with pytest.raises(WeightMismatchError, match="digest"):
            subscriber.wait(WAIT_S)
        assert fetch(subscriber, learner.publish(1)).version == 1


def poll(subscriber: Subscriber) -> StagedWeights:
    """As a generator does it between decode steps."""
    while (staged := subscriber.ready()) is None:
        pass
    return staged


@pytest.fixture
def _hasty_threads() -> Iterator[None]:
    """Threads change places every few bytecodes, so that races show."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("_hasty_threads")
def test_a_failed_version_can_be_tried_again_as_soon_as_the_error_is_seen(tmp_path):
    with (
        learning([("weight", torch.ones(10))], tmp_path, "shm") as learner,
        generating(tmp_path) as subscriber,
    ):
        for version in range(200):
            announcement = learner.publish(version)
            subscriber.start(announcement.model_copy(update={"manifest_digest": "00" * 32}))
            with pytest.raises(WeightMismatchError, match="digest"):
                poll(subscriber)
            assert fetch(subscriber, announcement).version == version


# runs beside each other, and askers who must not be served


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_runs_on_a_host_do_not_meet(transport, tmp_path):
    one, two = torch.full((100,), 1.0), torch.full((100,), 2.0)
    with (
        learning([("weight", one)], tmp_path, transport, run_id="a") as learner_a,
        learning([("weight", two)], tmp_path, transport, run_id="a-1") as learner_b,
        generating(tmp_path, run_id="a") as a,
        generating(tmp_path, run_id="a-1") as b,
    ):
        of_a, of_b = learner_a.publish(0), learner_b.publish(0)
        assert of_a.endpoint != of_b.endpoint
        assert torch.equal(next(fetch(a, of_a).tensors())[1], one)
        assert torch.equal(next(fetch(b, of_b).tensors())[1], two)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_foreign_run_is_refused(transport, tmp_path):
    with (
        learning([("weight", torch.ones(3))], tmp_path, transport, run_id="theirs") as learner,
        generating(tmp_path, run_id="ours") as subscriber,
    ):
        subscriber.start(learner.publish(0))
        with pytest.raises(ProtocolError, match="theirs"):
            subscriber.wait(WAIT_S)


@pytest.mark.parametrize("endpoint", ["/etc/passwd", "../asyncrl-run-1-0", "asyncrl-run-1-1", ""])
def test_no_file_is_opened_under_a_name_from_the_wire(endpoint, tmp_path):
    with (
        learning([("weight", torch.ones(3))], tmp_path, "shm") as learner,
        generating(tmp_path) as subscriber,
    ):
        subscriber.start(learner.publish(0).model_copy(update={"endpoint": endpoint}))
        with pytest.raises(ProtocolError, match=r"expected '.*asyncrl-run-1-0'"):
            subscriber.wait(WAIT_S)


def test_a_symbolic_link_is_not_followed(tmp_path):
    with (
        learning([("weight", torch.ones(3))], tmp_path, "shm") as learner,
        generating(tmp_path) as subscriber,
    ):
        announcement = learner.publish(0)
        path = Path(announcement.endpoint)
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
        subscriber.start(announcement)
        with pytest.raises(OSError, match="symbolic"):
            subscriber.wait(WAIT_S)
        path.unlink()
        (tmp_path / "moved").rename(path)


def test_a_wrong_token_is_refused(tmp_path):
    with learning([("weight", torch.ones(3))], tmp_path, "tcp", token="key") as learner:
        announcement = learner.publish(0)
        with generating(tmp_path, token="kex") as stranger:
            stranger.start(announcement)
            with pytest.raises(ProtocolError, match="wrong token"):
                stranger.wait(WAIT_S)
        with generating(tmp_path, token="key") as friend:
            assert fetch(friend, announcement).version == 0


def test_the_server_answers_only_what_it_holds_and_refuses_the_rest(tmp_path):
    with learning([("weight", torch.ones(1000))], tmp_path, "tcp", token="key") as learner:
        endpoint = learner.publish(3).endpoint  # 4032 bytes: chunks 0 to 4
        right = messages.WantChunk(run_id="run", token="key", epoch=1, version=3, index=4)
        with closing(Channel(endpoint)) as channel:
            for changes, expected in [
                ({}, "chunk"),
                ({"index": 5}, "refuse"),
                ({"index": 2**62}, "refuse"),
                ({"epoch": 0}, "gone"),
                ({"version": 2}, "gone"),
                ({"run_id": "other"}, "refuse"),
                ({"token": ""}, "refuse"),
                ({"token": "kéy"}, "refuse"),
            ]:
                channel.send(right.model_copy(update=changes))
                answer = channel.receive(WAIT_S)
                assert answer is not None
                assert answer.message.kind == expected, changes
                assert [len(frame) for frame in answer.frames] == [32] * (expected == "chunk")
            channel.send(messages.Beat())
            assert channel.receive(WAIT_S).message.kind == "refuse"


def test_another_host_is_served_only_with_a_token(tmp_path):
    with pytest.raises(ConfigError, match=r"broker\.token_path"):
        Learner([("weight", torch.ones(3))], tmp_path, "tcp", host="0.0.0.0")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_ours_is_named_at_start(host, tmp_path):
    with pytest.raises(ConfigError, match=host):
        Learner([("weight", torch.ones(3))], tmp_path, "tcp", host=host, token="key")
