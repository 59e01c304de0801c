"""Sockets: hostile peers, limits, addresses that do not work, and one owner each."""

import os
import socket
import threading
from contextlib import closing

import pytest

from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.wire.channel import Channel, Listener, Malformed
from asyncrl.wire.codec import encode
from asyncrl.wire.messages import Beat, Refuse, WantBatch
from tests.unit.peers import LOOPBACK, PATIENCE_S, connected, done, hello, raw_dealer


@pytest.mark.parametrize("parts", [[b"junk"], [b""], [b"", b"x"], [*encode(Beat()), b"more"]])
def test_rubbish_is_reported_with_its_sender_and_the_next_peer_is_served(parts):
    with connected() as (listener, channel), raw_dealer(listener.endpoint) as vandal:
        vandal.send_multipart(parts)
        rubbish = listener.receive(PATIENCE_S)
        assert isinstance(rubbish, Malformed)
        assert ": got " in rubbish.reason
        assert listener.send(rubbish.sender, Refuse(reason=rubbish.reason))
        assert vandal.poll(PATIENCE_S * 1000)

        channel.send(WantBatch(step=1))
        assert listener.receive(PATIENCE_S).message == WantBatch(step=1)


def test_a_peer_that_does_not_speak_zmq_disturbs_nobody():
    with connected() as (listener, channel):
        port = int(listener.endpoint.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 1000)
            channel.send(WantBatch(step=1))
            assert listener.receive(PATIENCE_S).message == WantBatch(step=1)


def test_a_message_above_the_limit_is_refused_at_send_and_the_channel_still_works():
    with connected(max_message_bytes=1000) as (listener, channel):
        too_large = r"got 10\d\d bytes to send, expected at most 1000"
        with pytest.raises(ProtocolError, match=too_large):
            channel.send(done(1), [bytes(500), bytes(500)])
        channel.send(done(2), [bytes(500)])
        request = listener.receive(PATIENCE_S)
        assert request.message == done(2)
        with pytest.raises(ProtocolError, match="expected at most 1000"):
            listener.send(request.sender, done(3), [bytes(1000)])


def test_a_message_above_the_limit_from_a_peer_that_does_not_care_stops_nobody():
    with (
        connected(max_message_bytes=1000) as (listener, channel),
        raw_dealer(listener.endpoint) as vandal,
    ):
        vandal.send_multipart(encode(done(1), [bytes(500), bytes(500)]))
        malformed = listener.receive(PATIENCE_S)
        assert isinstance(malformed, Malformed)
        assert "expected at most 1000" in malformed.reason
        vandal.send_multipart(encode(done(2), [bytes(1001)]))  # zmq hangs up on this one
        channel.send(done(3))
        assert listener.receive(PATIENCE_S).message == done(3)


def test_a_taken_port_is_an_error_that_names_the_address():
    with (
        closing(Listener(LOOPBACK, max_message_bytes=2**20)) as listener,
        pytest.raises(ConfigError, match=f"{listener.endpoint}.*Address already in use"),
    ):
        Listener(listener.endpoint, max_message_bytes=2**20)


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://", "smoke://x:1", "ipc://" + "x" * 200])
def test_an_address_that_is_none_is_an_error_that_names_it(address):
    with pytest.raises(ConfigError, match=f"cannot listen on '{address}'"):
        Listener(address, max_message_bytes=2**20)
    with pytest.raises(ConfigError, match=f"cannot connect to '{address}'"):
        Channel(address)


def test_an_ipc_address_is_private_and_taken_over_only_from_the_dead(tmp_path):
    path = tmp_path / "broker"
    with closing(Listener(f"ipc://{path}", max_message_bytes=2**20)):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="Address already in use"):
            Listener(f"ipc://{path}", max_message_bytes=2**20)

    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    assert path.is_socket()
    with (
        closing(Listener(f"ipc://{path}", max_message_bytes=2**20)) as listener,
        closing(Channel(listener.endpoint)) as channel,
    ):
        hello(listener, channel)


def test_a_file_in_the_place_of_an_ipc_address_is_kept(tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine")

    with pytest.raises(ConfigError, match="is no socket"):
        Listener(f"ipc://{path}", max_message_bytes=2**20)

    assert path.read_text() == "mine"


def test_a_socket_refuses_another_thread_and_another_process():
    with connected() as (listener, channel):
        for use in (
            lambda: channel.send(Beat()),
            lambda: channel.receive(0.0),
            lambda: listener.receive(0.0),
            channel.close,
        ):
            seen = []
            thread = threading.Thread(target=lambda use=use, seen=seen: seen.append(refused(use)))
            thread.start()
            thread.join(PATIENCE_S)
            assert seen == [True]

        child = os.fork()
        if child == 0:
            os._exit(0 if refused(lambda: channel.send(Beat())) else 1)
        assert os.waitpid(child, 0)[1] == 0
        hello(listener, channel)


def refused(use) -> bool:
    try:
        use()
    except AssertionError as error:
        return "one owner" in str(error)
    return False
