"""Sockets: what was sent arrives once and unchanged, and a lost peer stops nobody."""

import hashlib
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager

import pytest

from asyncrl.wire.channel import Channel, Envelope, Listener
from asyncrl.wire.codec import encode
from asyncrl.wire.messages import Beat, Chunk, WantBatch
from tests.unit.peers import LOOPBACK, PATIENCE_S, connected, done, hello, raw_dealer


def run_in_thread(target):
    """Run to the end in another thread; a hang is a failure here, not of the whole test run."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "hangs"


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_requests_and_answers_arrive_whole_over(scheme, tmp_path):
    address = LOOPBACK if scheme == "tcp" else f"ipc://{tmp_path}/broker"
    with (
        closing(Listener(address, max_message_bytes=2**20)) as listener,
        closing(Channel(listener.endpoint)) as channel,
    ):
        channel.send(done(7), [b"one", b"", b"\x00\xff"])
        request = listener.receive(PATIENCE_S)
        assert request.message == done(7)
        assert [bytes(frame) for frame in request.frames] == [b"one", b"", b"\x00\xff"]

        chunk = Chunk(epoch=1, version=2, index=3)
        assert listener.send(request.sender, chunk, [b"bytes"])
        answer = channel.receive(PATIENCE_S)
        assert (answer.message, [bytes(f) for f in answer.frames]) == (chunk, [b"bytes"])
        assert channel.receive(0.0) is None
        assert listener.receive(0.0) is None


def test_answers_reach_the_peer_they_are_for():
    with connected() as (listener, first), closing(Channel(listener.endpoint)) as second:
        first.send(WantBatch(step=1))
        second.send(WantBatch(step=2))
        for _ in range(2):
            request = listener.receive(PATIENCE_S)
            listener.send(request.sender, WantBatch(step=request.message.step * 10))

        assert first.receive(PATIENCE_S).message == WantBatch(step=10)
        assert second.receive(PATIENCE_S).message == WantBatch(step=20)


def test_no_message_is_lost_or_split_under_1_ms_receive_timeouts():
    with closing(Listener(LOOPBACK, max_message_bytes=2**20)) as listener:

        def send():
            with closing(Channel(listener.endpoint)) as channel:
                for number in range(10_000):
                    channel.send(done(number), [b"%d" % number])
                finished.wait(PATIENCE_S)

        finished = threading.Event()
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        got = []
        deadline_s = time.monotonic() + PATIENCE_S
        while len(got) < 10_000 and time.monotonic() < deadline_s:
            envelope = listener.receive(0.001)
            if envelope is not None:
                assert bytes(envelope.frames[0]) == b"%d" % envelope.message.group_id
                got.append(envelope.message.group_id)
        finished.set()
        sender.join(PATIENCE_S)

    assert got == list(range(10_000))


ECHO = """
import sys
from asyncrl.wire.channel import Listener
listener = Listener(sys.argv[1], max_message_bytes=2**20)
print(listener.endpoint, flush=True)
while True:
    envelope = listener.receive(1.0)
    if envelope is not None and sys.argv[2] == "answer":
        listener.send(envelope.sender, envelope.message)
"""


@contextmanager
def echo_process(address, manner):
    with subprocess.Popen(
        [sys.executable, "-c", ECHO, address, manner], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_after_a_peer_was_killed_and_restarted_the_next_request_succeeds():
    with echo_process(LOOPBACK, "mute") as (process, endpoint):
        channel = Channel(endpoint)
        channel.send(WantBatch(step=1))
        assert channel.receive(0.05) is None
        process.kill()
        process.wait(PATIENCE_S)

    with echo_process(endpoint, "answer") as (_, again), closing(channel):
        assert again == endpoint
        answers = set()
        deadline_s = time.monotonic() + PATIENCE_S
        while 2 not in answers and time.monotonic() < deadline_s:
            channel.send(WantBatch(step=2))
            envelope = channel.receive(1.0)
            answers |= {envelope.message.step} if envelope else set()
        assert 2 in answers


def test_a_sender_keeps_its_name_through_a_reconnection():
    listener = Listener(LOOPBACK, max_message_bytes=2**20)
    endpoint = listener.endpoint
    with closing(Channel(endpoint)) as channel:
        channel.send(Beat())
        before = listener.receive(PATIENCE_S).sender
        listener.close()
        with closing(Listener(endpoint, max_message_bytes=2**20)) as listener:
            channel.send(Beat())
            assert listener.receive(PATIENCE_S).sender == before


def test_a_reconnected_peer_is_heard_while_its_old_connection_seems_alive():
    with (
        closing(Listener(LOOPBACK, max_message_bytes=2**20)) as listener,
        raw_dealer(listener.endpoint, ROUTING_ID=b"same", RECONNECT_IVL=-1) as old,
    ):
        old.send_multipart(encode(WantBatch(step=1)))
        assert listener.receive(PATIENCE_S).message == WantBatch(step=1)
        with raw_dealer(listener.endpoint, ROUTING_ID=b"same") as new:
            new.send_multipart(encode(WantBatch(step=2)))
            envelope = listener.receive(PATIENCE_S)
            assert envelope.message == WantBatch(step=2)
            assert listener.send(envelope.sender, Beat())
            assert new.poll(PATIENCE_S * 1000)


def test_closing_does_not_wait_for_a_dead_peer():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def talk_to_nobody():
        channel = Channel(f"tcp://127.0.0.1:{port}")
        for step in range(100):
            channel.send(WantBatch(step=step))
        assert channel.receive(0.01) is None
        channel.close()
        channel.close()

    run_in_thread(talk_to_nobody)


FORGETFUL = """
from asyncrl.wire.channel import Channel
from asyncrl.wire.messages import Beat
def forget(port):
    Channel(f"tcp://127.0.0.1:{port}").send(Beat())
forget(1)
"""


def test_a_process_that_forgot_to_close_a_channel_to_nobody_ends():
    command = [sys.executable, "-W", "ignore", "-c", FORGETFUL]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0


def test_a_buffer_changed_right_after_send_was_sent_as_it_was():
    sizes = [100_000, 1_000_000, 3_000_000]
    with connected() as (listener, channel):
        digests = []
        buffer = bytearray(max(sizes))
        for number in range(60):
            view = memoryview(buffer)[: sizes[number % 3]]
            view[:] = bytes([number]) * len(view)
            digests.append(hashlib.sha256(view).digest())
            channel.send(done(number), [view, view.toreadonly(), view[::100]])
            view[:] = b"\xee" * len(view)

        for number in range(60):
            whole, read_only, sparse = listener.receive(PATIENCE_S).frames
            assert hashlib.sha256(whole).digest() == digests[number]
            assert hashlib.sha256(read_only).digest() == digests[number]
            assert bytes(sparse) == bytes([number]) * (sizes[number % 3] // 100)


def test_received_frames_cannot_be_written_and_outlive_the_next_messages():
    with connected() as (listener, channel):
        for number in range(100):
            channel.send(done(number), [bytes([number]) * 50, bytes([number]) * 70_000])
        kept = [listener.receive(PATIENCE_S).frames for _ in range(100)]

        with pytest.raises(TypeError, match="read-only"):
            kept[0][0][0] = 1
        # Passed on as they are, the way a broker does it.
        name = hello(listener, channel)
        for number, frames in enumerate(kept):
            assert listener.send(name, done(number), frames)
        for number in range(100):
            small, large = channel.receive(PATIENCE_S).frames
            assert (set(small), set(large)) == ({number}, {number})
            assert (len(small), len(large)) == (50, 70_000)


def test_sending_to_a_peer_that_left_or_never_was_returns_false():
    with closing(Listener(LOOPBACK, max_message_bytes=2**20)) as listener:
        assert not listener.send(b"nobody", Beat())
        channel = Channel(listener.endpoint)
        name = hello(listener, channel)
        assert listener.send(name, Beat())
        channel.close()
        deadline_s = time.monotonic() + PATIENCE_S
        while listener.send(name, Beat()) and time.monotonic() < deadline_s:
            listener.receive(0.01)
        assert not listener.send(name, Beat())


def test_a_peer_that_does_not_read_is_answered_false_and_the_others_are_served():
    with (
        connected() as (listener, channel),
        raw_dealer(listener.endpoint, RCVHWM=1, RCVBUF=4096) as lazy,
    ):
        lazy.send_multipart(encode(Beat()))
        name = listener.receive(PATIENCE_S).sender
        payload = [bytes(2**20)]  # Kernel buffers fill at once; the bytes themselves are shared.
        sent = 0
        while sent < 50_000 and listener.send(name, Chunk(epoch=1, version=1, index=0), payload):
            sent += 1
        assert sent < 50_000

        other = hello(listener, channel)
        assert listener.send(other, Beat())
        assert isinstance(channel.receive(PATIENCE_S), Envelope)


def test_sockets_can_be_made_and_freed_many_times():
    for _ in range(100):
        with connected() as (listener, channel):
            hello(listener, channel)
