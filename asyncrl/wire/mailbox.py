"""A peer's line to the broker: a thread that owns the socket while the main thread computes.

| the thread, each turn                       | the caller                                        |
|---------------------------------------------|---------------------------------------------------|
| reads all that came; Beats end here         | receive: next message, or the thread's error      |
| shows each to `listen`'s listener           |                                                   |
| sends what waits in the outbox              | send: into the outbox, and wakes the thread       |
| sends Beat, every welcome.beat_s            |                                                   |
| ends if nothing came for welcome.silence_s  | send, receive: PeerLostError                      |

Invariant: Beats leave and control messages arrive however long the caller computes, and no error of
the thread is lost: the next call raises it. Messages that came before an error are delivered first.
"""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from typing_extensions import Buffer

from asyncrl.errors import PeerLostError, ProtocolError, RefusedError
from asyncrl.handover import Handover
from asyncrl.wire.bell import Bell
from asyncrl.wire.channel import MAX_MESSAGE_BYTES, Channel, Envelope, stable
from asyncrl.wire.codec import encode
from asyncrl.wire.messages import Beat, Bye, Hello, Message, Refuse, Welcome

FLUSH_S = 2.0
"""How long `close` may take to deliver what was sent."""


class Mailbox:
    """One peer's connection to the broker; every method may be called from any thread."""

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        *,
        connect_timeout_s: float,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Say `hello` and wait for the Welcome.

        Raises:
            RefusedError: the broker refused; the message is its reason.
            ProtocolError: it sent what is no Welcome.
            PeerLostError: no answer within `connect_timeout_s`.
            ConfigError: `endpoint` is no address.
        """
        self.bell = Bell()
        """Rings when `receive` has got something to return or to raise; others may ring it as well."""

        self._endpoint = endpoint
        self._max_message_bytes = max_message_bytes
        self._changed = threading.Condition()
        self._outbox: deque[list[Buffer]] = deque()
        self._inbox: deque[Envelope] = deque()
        self._listener: Callable[[Message], None] | None = None
        self._welcome: Welcome | None = None
        self._failure = Handover()
        self._closing = False
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._thread = threading.Thread(
            target=self._run, args=(hello, connect_timeout_s), name="mailbox", daemon=True
        )
        self._thread.start()
        try:
            with self._changed:  # The thread keeps the deadline: it sets one of the two.
                self._changed.wait_for(lambda: self._welcome or self._failure.failed)
                self._failure.raise_if_failed()
        finally:
            if self._welcome is None:
                self._end()

    @property
    def welcome(self) -> Welcome:
        """The broker's answer to the hello."""
        assert self._welcome is not None, "__init__ returns only once it is there"
        return self._welcome

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Queue `message` and return; frames may change then (all but immutable ones are copied).

        Raises:
            ProtocolError: codec.encode refuses the message.
            PeerLostError: the broker is lost, or the mailbox closed.
        """
        parts = encode(message, [stable(frame) for frame in frames])
        with self._changed:
            self._failure.raise_if_failed()
            if self._closing:
                raise PeerLostError(f"the mailbox to {self._endpoint} is closed")
            self._outbox.append(parts)
        self._wake()

    def receive(self, timeout_s: float) -> Envelope | None:
        """The next message other than Beat; None after `timeout_s` (0: only what is there).

        Raises:
            PeerLostError: nothing was heard from the broker for welcome.silence_s, or the mailbox
                is closed.
            RefusedError: the broker sent Refuse.
            ProtocolError: it sent what is no message.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._inbox or self._failure.failed or self._closing, max(0.0, timeout_s)
            )
            if self._inbox:
                return self._inbox.popleft()
            self._failure.raise_if_failed()
            if self._closing:
                raise PeerLostError(f"the mailbox to {self._endpoint} is closed")
            return None

    def listen(self, listener: Callable[[Message], None]) -> None:
        """Show `listener` every message, in order and once, also those that wait for `receive`.

        It is called from the thread as soon as a message has come, so the caller may be computing; it
        must be quick and call no method of the mailbox. What it raises is the thread's error.
        """
        with self._changed:
            for envelope in self._inbox:
                listener(envelope.message)
            self._listener = listener

    def close(self, reason: str, failed: bool = False) -> None:
        """Send what waits and a Bye, for at most FLUSH_S, and end the thread; idempotent."""
        with self._changed:
            if not self._closing:
                self._outbox.append(encode(Bye(reason=reason, failed=failed)))
        self._end()

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._wake()
            self._thread.join(FLUSH_S + 1.0)
        if not self._thread.is_alive():
            self._waker.close()
            self._wakened.close()
            self.bell.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # Full: the thread is being woken already.
            self._waker.send(b"\0")

    def _run(self, hello: Hello, connect_timeout_s: float) -> None:
        """The thread; what ends it is raised by every later call."""
        with self._failure:
            self._talk(hello, connect_timeout_s)
        if self._failure.failed:
            with self._changed:
                self._changed.notify_all()
            self.bell.ring()

    def _talk(self, hello: Hello, connect_timeout_s: float) -> None:
        channel = Channel(self._endpoint, max_message_bytes=self._max_message_bytes)
        linger_s = 0.0  # After an error nobody is there to read on.
        try:
            channel.send(hello)
            welcome = self._await_welcome(channel, connect_timeout_s)
            if welcome is not None:
                self._serve(channel, welcome)
                linger_s = FLUSH_S
        finally:
            channel.close(linger_s)

    def _await_welcome(self, channel: Channel, timeout_s: float) -> Welcome | None:
        """The Welcome; None if the caller gave up first."""
        deadline_s = time.monotonic() + timeout_s
        while not self._closing:
            remaining_s = deadline_s - time.monotonic()
            channel.wait(remaining_s, also=self._wakened.fileno())
            envelope = channel.receive(0.0)
            if envelope is None:
                if remaining_s <= 0.0:
                    raise PeerLostError(
                        f"{self._endpoint} did not answer Hello within {timeout_s:g} s; is the "
                        "broker running there (broker.address, host.start_timeout_s)?"
                    )
                continue
            self._admit(envelope)
            welcome = envelope.message
            if not isinstance(welcome, Welcome):
                raise ProtocolError(f"got {welcome.kind} as the answer to hello, expected welcome")
            with self._changed:
                self._welcome = welcome
                self._changed.notify_all()
            return welcome
        return None

    def _serve(self, channel: Channel, welcome: Welcome) -> None:
        """Carry messages both ways until the caller closes."""
        heard_s = time.monotonic()
        beat_s = heard_s + welcome.beat_s
        while True:
            due_s = min(beat_s, heard_s + welcome.silence_s)
            channel.wait(due_s - time.monotonic(), also=self._wakened.fileno())
            # Read before judging silence: this thread itself may have been stopped for a while.
            if self._collect(channel):
                heard_s = time.monotonic()
            if self._deliver(channel):
                return
            now_s = time.monotonic()
            if now_s >= heard_s + welcome.silence_s:
                raise PeerLostError(
                    f"{self._endpoint} was silent for {now_s - heard_s:.1f} s, expected a beat "
                    f"every {welcome.beat_s:g} s (broker.beat_s, broker.max_missed_beats)"
                )
            if now_s >= beat_s:
                channel.send(Beat())
                beat_s = now_s + welcome.beat_s

    def _collect(self, channel: Channel) -> bool:
        """Move what came to the inbox; whether anything came, Beats included."""
        heard = False
        while (envelope := channel.receive(0.0)) is not None:
            heard = True
            self._admit(envelope)
            if not isinstance(envelope.message, Beat):
                with self._changed:
                    if self._listener is not None:
                        self._listener(envelope.message)
                    self._inbox.append(envelope)
                    self._changed.notify_all()
                self.bell.ring()
        return heard

    def _admit(self, envelope: Envelope) -> None:
        """Raise on a Refuse, which a restarted broker may send at any time."""
        if isinstance(envelope.message, Refuse):
            raise RefusedError(f"refused by {self._endpoint}: {envelope.message.reason}")

    def _deliver(self, channel: Channel) -> bool:
        """Send what waits in the outbox; whether the caller has closed and that was the last."""
        with contextlib.suppress(BlockingIOError):  # Nothing: a timer or a message woke the thread.
            self._wakened.recv(4096)
        with self._changed:
            waiting = list(self._outbox)
            self._outbox.clear()
            closing = self._closing
        for parts in waiting:
            channel.send_encoded(parts)
        return closing
