"""The weight path against publishers that lie, stall or die: Listeners with a script."""

import threading

import pytest

from asyncrl.errors import PeerLostError, ProtocolError, WeightMismatchError
from asyncrl.wire import messages
from asyncrl.wire.channel import Envelope
from tests.unit.weight_peers import (
    WAIT_S,
    Answer,
    Script,
    fetch,
    generating,
    huge_manifest,
    make_manifest,
    payload_of,
    scripted,
)


def test_a_chunk_with_a_wrong_byte_is_asked_again_once(tmp_path):
    class OneBadByte(Script):
        def chunk(self, index: int) -> list[Answer]:
            data = self.chunks[index]
            if index == 1 and self.asked.count(1) == 1:
                data = bytes([data[0] ^ 1]) + data[1:]
            return [self.make_chunk(index, data)]

    script = OneBadByte()
    with scripted(script) as endpoint, generating(tmp_path) as subscriber:
        staged = fetch(subscriber, script.announcement(endpoint))
        assert payload_of(staged) == Script.payload[:350]
        assert sorted(script.asked) == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("damage", ["flip", "short", "long", "empty"])
def test_a_chunk_that_stays_wrong_ends_the_fetch(damage, tmp_path):
    class Liar(Script):
        def chunk(self, index: int) -> list[Answer]:
            data = self.chunks[index]
            lies = {"flip": data[:-1] + b"x", "short": data[:-1], "long": data + b"x", "empty": b""}
            return [self.make_chunk(index, lies[damage] if index == 2 else data)]

    script = Liar()
    with scripted(script) as endpoint, generating(tmp_path) as subscriber:
        subscriber.start(script.announcement(endpoint))
        with pytest.raises(WeightMismatchError, match="chunk 2 of 4"):
            subscriber.wait(WAIT_S)
        assert script.asked.count(2) == 2


def test_chunks_may_come_in_any_order(tmp_path):
    class Backwards(Script):
        def chunk(self, index: int) -> list[Answer]:
            # Holds answers back until 2 are asked for, then gives the later one first.
            if len(self.asked) % 2:
                return []
            return [self.make_chunk(i, self.chunks[i]) for i in reversed(self.asked[-2:])]

    script = Backwards()
    with scripted(script) as endpoint, generating(tmp_path, chunks_in_flight=2) as subscriber:
        staged = fetch(subscriber, script.announcement(endpoint))
        assert payload_of(staged) == Script.payload[:350]
        assert script.asked == [0, 1, 2, 3]


def test_a_publisher_that_falls_silent_is_lost_in_time(tmp_path):
    class Silent(Script):
        def chunk(self, index: int) -> list[Answer]:
            return super().chunk(index) if index == 0 else []

    script = Silent(version=6)
    options = {"timeout_s": 0.3, "chunks_in_flight": 2}
    with scripted(script) as endpoint, generating(tmp_path, **options) as subscriber:
        subscriber.start(script.announcement(endpoint))
        with pytest.raises(PeerLostError, match=f"version 6: chunk 1 of 4 .*{endpoint}"):
            subscriber.wait(WAIT_S)
        assert subscriber.ready() is None
    assert max(script.asked) <= 2  # 0 was answered; 1 and 2 fill the two places


def test_a_publisher_that_is_not_there_is_lost_in_time(tmp_path):
    with scripted(Script()) as endpoint:
        pass  # closed again: nobody listens
    with generating(tmp_path, timeout_s=0.3) as subscriber:
        subscriber.start(Script().announcement(endpoint))
        with pytest.raises(PeerLostError, match="manifest did not come"):
            subscriber.wait(WAIT_S)


def test_a_version_retired_half_way_is_no_error(tmp_path):
    class Retiring(Script):
        def chunk(self, index: int) -> list[Answer]:
            if index < 2:
                return super().chunk(index)
            return [(messages.Gone(epoch=1, version=self.version, reason="retired"), [])]

    old, new = Retiring(version=0), Script(version=1)

    def both(asked: Envelope) -> list[Answer]:
        return old(asked) if asked.message.version == 0 else new(asked)

    with scripted(both) as endpoint, generating(tmp_path, chunks_in_flight=3) as subscriber:
        subscriber.start(old.announcement(endpoint))
        assert subscriber.wait(WAIT_S) is None
        assert subscriber.num_superseded == 1
        # Late Gones of version 0 are still on the line and must not hurt version 1.
        assert payload_of(fetch(subscriber, new.announcement(endpoint))) == Script.payload[:350]


def test_of_the_announcements_given_meanwhile_only_the_newest_is_fetched(tmp_path):
    asked_versions: list[int] = []
    given = threading.Event()
    began = threading.Event()
    scripts = [Script(version=version) for version in range(4)]

    def script(asked: Envelope) -> list[Answer]:
        if isinstance(asked.message, messages.WantManifest):
            asked_versions.append(asked.message.version)
            began.set()
            assert given.wait(WAIT_S)
        return scripts[asked.message.version](asked)

    with scripted(script) as endpoint, generating(tmp_path) as subscriber:
        subscriber.start(scripts[0].announcement(endpoint))
        assert began.wait(WAIT_S)
        for version in (1, 2, 3):
            subscriber.start(scripts[version].announcement(endpoint))
        given.set()
        first = subscriber.wait(WAIT_S)
        assert first.version == 0
        first.release()
        assert subscriber.wait(WAIT_S).version == 3
    assert asked_versions == [0, 3]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((messages.Chunk(epoch=1, version=0, index=4), [b"x"]), "not asked for"),
        ((messages.Manifest(epoch=1, version=0), [b"x"]), "not asked for"),
        ((messages.Beat(), []), "does not send 'beat'"),
        ((messages.Refuse(reason="not you"), []), "not you"),
    ],
)
def test_an_answer_that_breaks_the_protocol_ends_the_fetch(answer, reason, tmp_path):
    class Confused(Script):
        def chunk(self, index: int) -> list[Answer]:
            return [answer]

    script = Confused()
    with scripted(script) as endpoint, generating(tmp_path) as subscriber:
        subscriber.start(script.announcement(endpoint))
        with pytest.raises(ProtocolError, match=reason):
            subscriber.wait(WAIT_S)


@pytest.mark.parametrize("lie", [{"run_id": "other"}, {"epoch": 2}, {"version": 3}])
def test_a_manifest_of_another_run_epoch_or_version_is_refused(lie, tmp_path):
    script = Script(**lie) if "version" not in lie else Script(0, **{"epoch": 9})
    with scripted(script) as endpoint, generating(tmp_path) as subscriber:
        subscriber.start(script.announcement(endpoint))
        with pytest.raises(WeightMismatchError, match="announced was"):
            subscriber.wait(WAIT_S)
        assert script.asked == []


def test_a_huge_claim_on_the_wire_is_refused_before_a_chunk_is_asked_for(tmp_path):
    script = Script(**{key: huge_manifest()[key] for key in make_manifest() if key != "version"})
    with scripted(script) as endpoint, generating(tmp_path, max_total_bytes=2**30) as subscriber:
        subscriber.start(script.announcement(endpoint))
        with pytest.raises(WeightMismatchError, match="at most"):
            subscriber.wait(WAIT_S)
        assert script.asked == []


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/x", "tcp://*:*", "inproc://a", "", "tcp://h:1/x"])
def test_a_strange_address_is_refused(endpoint, tmp_path):
    with generating(tmp_path) as subscriber:
        subscriber.start(Script().announcement(endpoint))
        with pytest.raises(ProtocolError, match="expected tcp://"):
            subscriber.wait(WAIT_S)


def test_digests_that_can_be_forged_are_refused_from_a_network(tmp_path):
    script = Script(digest_kind="folded")
    with scripted(script) as endpoint, generating(tmp_path) as subscriber:
        subscriber.start(script.announcement(endpoint))
        with pytest.raises(WeightMismatchError, match="must have sha256"):
            subscriber.wait(WAIT_S)
        assert script.asked == []
