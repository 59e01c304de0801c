"""The sockets: a Listener for the side that is found, a Channel for the side that finds it.

| class    | socket | owner                | a lost peer shows as                                  |
|----------|--------|----------------------|-------------------------------------------------------|
| Listener | ROUTER | broker, publisher    | send returns False                                    |
| Channel  | DEALER | one thread of a peer | receive returns None; ask again, zmq reconnects alone |

Invariants: no call waits longer than its timeout; a full pipe is an answer, never a silent loss; a
socket is used by the thread that made it, and its context is made with it, so after any fork. This
is the only file that imports zmq. DEALER and not REQ, because a REQ whose reply was lost can never
send again (ZeroMQ guide, chapter 4, "Reliable Request-Reply Patterns").
"""

import math
import os
import socket
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from typing_extensions import Buffer

from asyncrl.errors import ConfigError, PeerLostError, ProtocolError
from asyncrl.wire.codec import decode, encode
from asyncrl.wire.messages import Message

MAX_MESSAGE_BYTES: Final = 2**31
"""Default limit of one message, all frames together."""

LINGER_S: Final = 0.5
"""How long a closing socket may still try to deliver."""

_MAX_WAITING: Final = 10_000
"""Messages that may wait for one peer. Payloads are pulled, so a peer that lets this many small
messages pile up is gone, and is answered as such."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message that came, its payload frames (read-only views), and the peer to answer."""

    message: Message
    frames: list[memoryview]
    sender: bytes
    """Names one Channel or Mailbox for its whole life, reconnections included; b"" at a Channel."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A peer sent what is no message; `reason` names the field."""

    sender: bytes
    reason: str


def stable(frame: Buffer) -> Buffer:
    """`frame` itself if nobody can change it while it is being sent, else a copy as bytes.

    Never copied: `bytes`, and read-only views of them or of received frames.
    """
    if isinstance(frame, bytes):
        return frame
    view = memoryview(frame)
    if view.readonly and isinstance(view.obj, bytes | zmq.Frame):
        return view
    return view.tobytes()


class _Socket:
    """One zmq socket with its own context, used and closed by the thread that made it."""

    def __init__(self, socket_type: int, address: str, max_message_bytes: int) -> None:
        self._owner = (os.getpid(), threading.get_ident())
        self._max_message_bytes = max_message_bytes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(socket_type)
        options = {
            zmq.LINGER: round(LINGER_S * 1000),
            zmq.SNDHWM: _MAX_WAITING,
            zmq.RCVHWM: _MAX_WAITING,
            zmq.MAXMSGSIZE: max_message_bytes,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 30,
            zmq.TCP_KEEPALIVE_INTVL: 10,
            zmq.TCP_KEEPALIVE_CNT: 3,
            zmq.RECONNECT_IVL: 50,
            zmq.RECONNECT_IVL_MAX: 1000,
            zmq.IPV6: int("[" in address),
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)

    def _check_owner(self) -> None:
        caller = (os.getpid(), threading.get_ident())
        assert caller == self._owner, (
            f"a socket has one owner: got (process, thread) {caller}, expected {self._owner}"
        )

    def wait(self, timeout_s: float, also: int | None = None) -> bool:
        """Wait until a message, or something on the file descriptor `also`, can be read.

        Returns:
            Whether a message is there.
        """
        self._check_owner()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if also is not None:
            poller.register(also, zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(max(0.0, timeout_s) * 1000)))
        return self._socket in ready

    def _take(self, timeout_s: float) -> list[memoryview] | None:
        """The frames of the next message, as read-only views that keep them alive."""
        if not self.wait(timeout_s):
            return None
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return [frame.buffer.toreadonly() for frame in frames]

    def _put(self, parts: Sequence[Buffer]) -> None:
        """Hand a message to zmq at once, or raise zmq.Again or zmq.ZMQError(EHOSTUNREACH)."""
        self._check_owner()
        parts = [stable(part) for part in parts]
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        if num_bytes > self._max_message_bytes:
            raise ProtocolError(
                f"message: got {num_bytes} bytes to send, expected at most "
                f"{self._max_message_bytes} (max_message_bytes); send it in parts"
            )
        self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)

    def close(self, linger_s: float = LINGER_S) -> None:
        """Try for at most `linger_s` to deliver what was sent, then free the socket; idempotent."""
        self._check_owner()
        if not self._context.closed:
            self._socket.close(linger=round(linger_s * 1000))
            self._context.term()


class Listener(_Socket):
    """Where peers are received; answers go to an Envelope's sender."""

    def __init__(self, address: str, *, max_message_bytes: int) -> None:
        """Bind: "tcp://127.0.0.1:*" picks a free port, "ipc://PATH" makes a file of mode 0600.

        A peer that sends a single frame above `max_message_bytes` is disconnected by zmq.

        Raises:
            ConfigError: the address is taken or cannot be bound.
        """
        super().__init__(zmq.ROUTER, address, max_message_bytes)
        self._endpoint = ""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer that reconnects takes its name along, even before its old connection timed out.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._bind(address)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {address!r}: {error}; expected a free address of this host, "
                'e.g. "tcp://127.0.0.1:*" (broker.address)'
            ) from error
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, address: str) -> None:
        if not address.startswith("ipc://"):
            self._socket.bind(address)
            return
        _check_not_served(Path(address.removeprefix("ipc://")))
        umask = os.umask(0o177)  # zmq makes the socket's file within this call.
        try:
            self._socket.bind(address)
        finally:
            os.umask(umask)

    def close(self, linger_s: float = LINGER_S) -> None:
        """As above; the file of an ipc address is removed."""
        is_first = not self._context.closed
        super().close(linger_s)
        if is_first and self._endpoint.startswith("ipc://"):
            Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    @property
    def endpoint(self) -> str:
        """The address really bound, with its port; what peers connect to."""
        return self._endpoint

    def receive(self, timeout_s: float) -> Envelope | Malformed | None:
        """The next message of any peer; None after `timeout_s`.

        Rubbish is returned as Malformed, for the caller to refuse or count; the listener lives on.
        """
        frames = self._take(timeout_s)
        if frames is None:
            return None
        sender = bytes(frames[0])
        num_bytes = sum(frame.nbytes for frame in frames[1:])
        if num_bytes > self._max_message_bytes:
            return Malformed(
                sender,
                f"message: got {num_bytes} bytes, expected at most {self._max_message_bytes}",
            )
        try:
            message, payload = decode(frames[1:])
        except ProtocolError as error:
            return Malformed(sender, str(error))
        return Envelope(message, payload, sender)

    def send(self, receiver: bytes, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Queue `message` for a peer without waiting; frames may change once this has returned.

        Returns:
            False if the peer is gone or does not read what it asked for; nothing was sent then.

        Raises:
            ProtocolError: codec.encode refuses the message, or it exceeds max_message_bytes.
        """
        try:
            self._put([receiver, *encode(message, frames)])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True


class Channel(_Socket):
    """A connection to a Listener, used from one thread; never waits for the other side to exist."""

    def __init__(self, endpoint: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Connect to a Listener's endpoint, now or whenever it comes up.

        Raises:
            ConfigError: `endpoint` is no address.
        """
        super().__init__(zmq.DEALER, endpoint, max_message_bytes)
        self._name = endpoint
        # A name of our own keeps `Envelope.sender` through reconnections; nobody can guess it.
        self._socket.setsockopt(zmq.ROUTING_ID, b"\x01" + uuid.uuid4().bytes)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot connect to {endpoint!r}: {error}; expected tcp://HOST:PORT or ipc://PATH"
            ) from error

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Queue `message`; frames may change once this has returned.

        What is on its way to a peer that dies is lost: a request needs a deadline and another try.

        Raises:
            ProtocolError: codec.encode refuses the message, or it exceeds max_message_bytes.
            PeerLostError: too many messages wait already.
        """
        self.send_encoded(encode(message, frames))

    def send_encoded(self, parts: Sequence[Buffer]) -> None:
        """`send` for what codec.encode returned."""
        try:
            self._put(parts)
        except zmq.Again as error:
            raise PeerLostError(
                f"{self._name} left {_MAX_WAITING} messages unread; is the broker running there?"
            ) from error

    def receive(self, timeout_s: float) -> Envelope | None:
        """The next message; None after `timeout_s`.

        Raises:
            ProtocolError: the other side sent what is no message.
        """
        frames = self._take(timeout_s)
        if frames is None:
            return None
        message, payload = decode(frames)
        return Envelope(message, payload, b"")


def _check_not_served(path: Path) -> None:
    """Raise OSError unless `path` is free or left by a crash; zmq would take over a live one."""
    if not path.exists():
        return
    if not path.is_socket():
        raise FileExistsError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise OSError("Address already in use")
