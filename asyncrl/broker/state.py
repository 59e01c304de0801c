"""The broker without sockets and clock: a message in, messages out.

This file: who is here, and when the run ends. What peers work on is epoch.py.

| event                                  | what it does                                            |
|----------------------------------------|---------------------------------------------------------|
| learner joins                          | new epoch: books at its version, prompts at its cursor  |
| generator joins before the learner     | its request for work stays open                         |
| GroupDone by the holder                | queued; or filtered (zero signal), or lost (unscored)   |
| GroupDone by anybody else, or twice    | nothing; counted as late                                |
| GroupFailed, timeout, generator gone   | credit returned; prompt to the front, or given up       |
| learner says Bye after the last step   | the run is over                                         |
| learner says Bye before                | nobody works until it returns with a higher epoch       |
| learner lost or failed, or no progress | the run is over and has failed                          |

Invariant: once the run is over every peer is told so, at that moment and again whenever it speaks.
"""

import logging
from collections.abc import Sequence

from typing_extensions import Buffer

from asyncrl.broker.epoch import Epoch
from asyncrl.broker.handshake import conflict, stranger
from asyncrl.broker.journal import Journal, NullJournal
from asyncrl.broker.peers import Outgoing, Peer, Peers
from asyncrl.broker.readout import status, waits_for
from asyncrl.broker.settings import Settings
from asyncrl.errors import AsyncRLError, NoProgressError, PeerLostError, ProtocolError
from asyncrl.types import GROUPS_PER_EPOCH
from asyncrl.wire.messages import (
    Announcement,
    Beat,
    Bye,
    Counters,
    GroupDone,
    GroupFailed,
    Hello,
    Message,
    Refuse,
    Stop,
    WantWork,
    Welcome,
)

log = logging.getLogger(__name__)


class Broker:
    """All state of one run. Times are seconds of one monotonic clock, handed in by the caller."""

    def __init__(
        self, settings: Settings, *, journal: Journal | None = None, now_s: float = 0.0
    ) -> None:
        """Built at `now_s`, without peers."""
        self.over: Stop | None = None
        """What peers are told when the run has ended; None while it runs."""

        self.failure: AsyncRLError | None = None
        """Why the run failed; None if it did not."""

        self.peers = Peers()
        self.epoch: Epoch | None = None
        """The work between the newest learner and the generators; None until one joined."""

        self._settings = settings
        self._journal = journal or NullJournal()
        self._no_learner_since_s = now_s
        self._num_late_groups = 0  # of senders that are no peers, and of earlier epochs
        self._outbox: list[Outgoing] = []

    def handle(
        self, sender: bytes, message: Message, frames: Sequence[Buffer], now_s: float
    ) -> list[Outgoing]:
        """Take one message; returns what is to be sent, in this order."""
        peer = self.peers.get(sender)
        if isinstance(message, Hello):
            self._hello(sender, message, now_s)
        elif peer is None:
            self._from_nobody(sender, message)
        else:
            peer.heard_s = now_s
            if isinstance(message, Bye):
                self._bye(peer, message, now_s)
            elif self.over is not None:
                self._send(peer, self.over)
            else:
                self._from_peer(peer, message, frames, now_s)
        return self._settle(now_s)

    def tick(self, now_s: float) -> list[Outgoing]:
        """What the passing of time alone causes: lost peers, overdue groups, no progress."""
        for peer in self.peers.silent(now_s, self._settings.silence_s):
            self._lose(peer, f"silent for {now_s - peer.heard_s:.0f} s (broker.max_missed_beats)")
        if self.over is None:
            if self.epoch is not None:
                self.epoch.expire(now_s)
            since_s = self._idle_since_s()
            if since_s is not None and now_s - since_s >= self._settings.no_progress_s:
                self._fail(
                    NoProgressError(
                        f"nothing was trained for {now_s - since_s:.0f} s "
                        f"(pipeline.no_progress_s): {waits_for(self.epoch, self.peers, now_s)}"
                    )
                )
        return self._settle(now_s)

    def malformed(self, sender: bytes, reason: str, now_s: float) -> list[Outgoing]:
        """`sender` sent what is no message: it is told and lost, the others go on."""
        peer = self.peers.get(sender)
        if peer is None:
            self._outbox.append(Outgoing(sender, Refuse(reason=reason)))
        else:
            self._expel(peer, ProtocolError(reason))
        return self._settle(now_s)

    def unreachable(self, sender: bytes, now_s: float) -> list[Outgoing]:
        """A message to `sender` could not be sent: if it is a peer, it is lost."""
        peer = self.peers.get(sender)
        if peer is not None:
            self._lose(peer, "unreachable")
        return self._settle(now_s)

    def stop(self, failure: AsyncRLError, now_s: float) -> list[Outgoing]:
        """End the run from outside."""
        self._fail(failure)
        return self._settle(now_s)

    def status(self, now_s: float) -> dict[str, object]:
        """What is waited for, the books, the queue; for logs."""
        late = self._num_late_groups + (self.epoch.num_late_groups if self.epoch else 0)
        return status(self.epoch, self.peers, now_s) | {"late_groups": late}

    # Peers come and go.

    def _hello(self, sender: bytes, hello: Hello, now_s: float) -> None:
        reason = stranger(hello, self._settings)
        known = self.peers.get(sender)
        if reason is None and self.over is not None:
            reason = f"the run is over: {self.over.reason}"
        if reason is None and known is not None:
            # Said twice: the first Welcome was slow. Anything else on this connection is a mix-up.
            if (known.role, known.name) == (hello.role, hello.name):
                known.heard_s = now_s
                self._welcome(known)
                return
            reason = f"this connection is {known.role} {known.name!r}, not {hello.name!r}"
        if reason is None:
            last_epoch = self.epoch.number if self.epoch is not None else None
            reason = conflict(hello, self.peers, last_epoch=last_epoch, now_s=now_s)
        if reason is not None:
            log.warning("refused a %s named %r: %s", hello.role, hello.name, reason)
            self._outbox.append(Outgoing(sender, Refuse(reason=reason)))
            return
        log.info("%s %r joined", hello.role, hello.name)
        before = self.peers.named(hello.name)
        if before is not None:
            self._lose(before, "started again")
        peer = Peer(sender, hello.role, hello.name, now_s, hello.incarnation)
        self.peers.add(peer)
        if peer.role == "learner":
            first_id = hello.epoch * GROUPS_PER_EPOCH
            if self.epoch is not None:
                first_id = max(first_id, self.epoch.groups.next_id)
                self._num_late_groups += self.epoch.num_late_groups
            self.epoch = Epoch(
                self._settings, self._journal, self.peers, learner=hello, first_id=first_id
            )
        self._welcome(peer)

    def _welcome(self, peer: Peer) -> None:
        newest: Announcement | None = None
        if peer.role == "generator" and self.epoch is not None and self.epoch.newest is not None:
            newest = self.epoch.newest
            peer.offered.append((newest.epoch, newest.version))
        settings = self._settings
        self._send(
            peer,
            Welcome(beat_s=settings.beat_s, silence_s=settings.silence_s, announcement=newest),
        )

    def _from_nobody(self, sender: bytes, message: Message) -> None:
        """A message of a sender that never joined, or was lost and did not notice."""
        if isinstance(message, Bye):
            return
        if isinstance(message, GroupDone | GroupFailed):
            self._num_late_groups += 1
        reason = f"the broker does not know you (any more): got {message.kind!r}, expected 'hello'"
        self._outbox.append(Outgoing(sender, Refuse(reason=reason)))

    def _from_peer(
        self, peer: Peer, message: Message, frames: Sequence[Buffer], now_s: float
    ) -> None:
        try:
            if isinstance(message, Beat):
                self._beat(peer)
            elif peer.role == "learner":
                assert self.epoch is not None, "a learner's Hello opens an epoch"
                self.epoch.from_learner(peer, message, now_s)
            elif isinstance(message, WantWork):
                peer.reports((message.epoch, message.version))
                peer.request, peer.requested_s = message, now_s
            elif isinstance(message, Counters):
                peer.counters = message.values
            elif self.epoch is not None:
                self.epoch.from_generator(peer, message, frames, now_s)
            else:
                raise ProtocolError(f"got {message.kind!r} before any work was given")
        except ProtocolError as error:
            self._expel(peer, error)
        except NoProgressError as error:
            self._fail(error)

    def _beat(self, peer: Peer) -> None:
        if peer.role == "generator" and self.epoch is not None and self.peers.learner is not None:
            self._outbox += self.epoch.beat(peer)
        self._send(peer, Beat())

    def _bye(self, peer: Peer, bye: Bye, now_s: float) -> None:
        if peer.role == "generator" or bye.failed:
            self._lose(peer, f"it said: {bye.reason}")
            return
        assert self.epoch is not None, "a learner's Hello opens an epoch"
        self.peers.remove(peer)
        self._no_learner_since_s = now_s
        self.epoch.want_step = None
        if self.epoch.groups.ledger.version >= self._settings.num_steps:
            self._end(f"all {self._settings.num_steps} steps are trained", None)

    def _lose(self, peer: Peer, why: str) -> None:
        log.warning("%s %r is gone: %s", peer.role, peer.name, why)
        self.peers.remove(peer)
        if peer.role == "learner":
            self._fail(PeerLostError(f"learner {peer.name!r} is lost: {why}"))
        elif self.epoch is not None:
            self.epoch.generator_left(peer.sender)

    def _expel(self, peer: Peer, error: ProtocolError) -> None:
        """A generator goes alone; without its learner the run has failed."""
        if peer.role == "learner":
            self._fail(ProtocolError(f"learner {peer.name!r}: {error}"))
            return
        self._send(peer, Stop(reason=str(error), failed=True))
        self._lose(peer, str(error))

    # The run ends.

    def _fail(self, failure: AsyncRLError) -> None:
        self._end(str(failure), failure)

    def _end(self, reason: str, failure: AsyncRLError | None) -> None:
        if self.over is not None:
            return
        self.over = Stop(reason=reason, failed=failure is not None)
        self.failure = failure
        for peer in self.peers:
            self._send(peer, self.over)

    # Answers and readouts.

    def _send(self, peer: Peer, message: Message) -> None:
        self._outbox.append(Outgoing(peer.sender, message))

    def _settle(self, now_s: float) -> list[Outgoing]:
        """Everything that can be answered by now, and what was put out before."""
        if self.over is None and self.epoch is not None and self.peers.learner is not None:
            for peer in self.peers.asking:
                if peer.holds is not None and peer.holds > self.epoch.weights:
                    held, newest = peer.holds, self.epoch.weights
                    text = f"you report (epoch, version) {held}, the newest that exists is {newest}"
                    self._expel(peer, ProtocolError(text))
            self._outbox += self.epoch.settle(now_s)
        outbox, self._outbox = self._outbox, []
        return outbox

    def _idle_since_s(self) -> float | None:
        """Since when nothing can be trained: no learner, or one that waits for a batch."""
        if self.peers.learner is None:
            return self._no_learner_since_s
        if self.epoch is None or self.epoch.want_step is None:
            return None
        return self.epoch.want_step_since_s
