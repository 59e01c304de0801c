"""Sockets for the tests of the wire."""

import queue
import threading
from contextlib import closing, contextmanager

import zmq

from asyncrl.wire.channel import Channel, Listener, Malformed
from asyncrl.wire.messages import Beat, GroupDone, Hello

LOOPBACK = "tcp://127.0.0.1:*"
PATIENCE_S = 20.0
"""Longer than anything here takes; reaching it is a failure."""


@contextmanager
def connected(*, max_message_bytes=2**24):
    with (
        closing(Listener(LOOPBACK, max_message_bytes=max_message_bytes)) as listener,
        closing(Channel(listener.endpoint, max_message_bytes=max_message_bytes)) as channel,
    ):
        yield listener, channel


@contextmanager
def raw_dealer(endpoint, **options):
    """A peer that does not speak our protocol."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            dealer.setsockopt(getattr(zmq, name), value)
        dealer.connect(endpoint)
        yield dealer


def hello(listener, channel) -> bytes:
    channel.send(Beat())
    return listener.receive(PATIENCE_S).sender


def done(group_id: int) -> GroupDone:
    return GroupDone(group_id=group_id, scores=[], num_tokens=0, oldest_version=0)


class Broker:
    """Answers Hello with `answer` and, unless `mute`, Beat with Beat; keeps what came."""

    def __init__(self, answer, *, mute=False):
        self.answer = answer
        self.mute = mute
        self.came: queue.Queue = queue.Queue()
        self.num_beats = 0
        self.beaten = threading.Event()
        self._to_send: queue.Queue = queue.Queue()
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    def _run(self):
        listener = Listener(LOOPBACK, max_message_bytes=2**24)
        self.endpoint = listener.endpoint
        self._ready.set()
        peer = b""
        while not self._stop.is_set():
            while not self._to_send.empty():
                self._say(listener, peer, self._to_send.get())
            envelope = listener.receive(0.005)
            if envelope is None:
                continue
            assert not isinstance(envelope, Malformed)
            peer = envelope.sender
            self._handle(listener, envelope)
        listener.close()

    def _say(self, listener, peer, message):
        if isinstance(message, list):
            listener._put([peer, *message])  # what Listener.send would refuse
        else:
            assert listener.send(peer, message)

    def _handle(self, listener, envelope):
        if isinstance(envelope.message, Beat):
            self.num_beats += 1
            if self.num_beats >= 20:
                self.beaten.set()
            if not self.mute:
                listener.send(envelope.sender, Beat())
            return
        self.came.put(envelope)
        if isinstance(envelope.message, Hello) and self.answer is not None:
            listener.send(envelope.sender, self.answer)

    def send(self, message):
        self._to_send.put(message)

    def get(self):
        return self.came.get(timeout=PATIENCE_S)

    def close(self):
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextmanager
def brokered(answer, *, mute=False):
    broker = Broker(answer, mute=mute)
    try:
        yield broker
    finally:
        broker.close()
