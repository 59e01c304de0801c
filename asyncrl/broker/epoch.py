"""The work of one epoch: from a learner's Hello until it leaves.

Level-triggered: events change the books, then `settle` answers whatever can be answered by now, in
this order: the learner's batch (it frees memory), the evaluation it waits for, then each open
request for work, longest waiting first. No answer hangs on one particular event, so none can be
forgotten.

A request for work is answered by the first of these that applies; * closes the request:
  1. Evaluate      an evaluation is due, and nothing newer was offered to the generator, which
                   therefore still holds what it reported;
  2. Announcement* newer weights than it was told of;
  3. Work*         credit, shared among those who ask. Only under weights of this epoch, or version 0:
                   the initial model has the same weights in every epoch.
"""

import logging
from collections.abc import Sequence

from typing_extensions import Buffer

from asyncrl.broker.evals import EvalSchedule
from asyncrl.broker.groups import Groups
from asyncrl.broker.journal import Journal
from asyncrl.broker.peers import Outgoing, Peer, Peers, Weights
from asyncrl.broker.settings import Settings
from asyncrl.errors import NoProgressError, ProtocolError
from asyncrl.wire.messages import (
    Announcement,
    Batch,
    EvalDone,
    EvalResults,
    Evaluate,
    GroupDone,
    GroupFailed,
    GroupRef,
    Hello,
    Message,
    SetStaleness,
    WantBatch,
    WantEval,
    Work,
)

log = logging.getLogger(__name__)


class Epoch:
    """Books, evaluations and open questions between one learner and all generators."""

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        peers: Peers,
        *,
        learner: Hello,
        first_id: int,
    ) -> None:
        """Open the books at the learner's version and cursor; group ids start at `first_id`."""
        self.number = learner.epoch
        self.newest: Announcement | None = None
        """What the learner published last."""

        self.want_step: int | None = None
        """The step whose batch the learner waits for, since `want_step_since_s`."""

        self.want_step_since_s = 0.0
        self.num_late_groups = 0
        """Reports on groups that their sender did not hold (any more)."""

        self.groups = Groups(settings, journal, learner=learner, first_id=first_id)
        self._evals = EvalSchedule(
            every_steps=settings.eval_every_steps,
            num_steps=settings.num_steps,
            first_version=learner.version,
        )
        self._want_eval: int | None = None
        self._learner = b""
        self._settings = settings
        self._peers = peers

    @property
    def weights(self) -> Weights:
        """The newest weights that can exist: those of the last step taken."""
        return self.number, self.groups.ledger.version

    def from_generator(
        self, peer: Peer, message: Message, frames: Sequence[Buffer], now_s: float
    ) -> None:
        """Book what a generator says.

        Raises:
            ProtocolError: it breaks the protocol and must go.
            NoProgressError: too many groups in a row carried no signal.
        """
        match message:
            case GroupDone():
                self._group_done(peer, message, frames, now_s)
            case GroupFailed():
                if self.groups.held(message.group_id, peer.sender) is None:
                    self.num_late_groups += 1
                else:
                    self.groups.fail(message.group_id, retry=message.retry, reason=message.reason)
            case EvalDone():
                peer.is_evaluating = False
                self._evals.finish(peer.sender, message)
            case _:
                raise ProtocolError(f"a generator may not send {message.kind!r} to the broker")

    def _group_done(
        self, peer: Peer, done: GroupDone, frames: Sequence[Buffer], now_s: float
    ) -> None:
        group = self.groups.held(done.group_id, peer.sender)
        if group is None:
            self.num_late_groups += 1
            return
        if not 1 <= len(done.scores) <= self._settings.group_size:
            raise ProtocolError(
                f"group {done.group_id} has {len(done.scores)} scores, expected 1 to "
                f"{self._settings.group_size} (pipeline.group_size)"
            )
        if done.num_tokens and not group.version <= done.oldest_version <= self.weights[1]:
            raise ProtocolError(
                f"group {done.group_id} was started under version {group.version}, the newest is "
                f"{self.weights[1]}, and its oldest token claims version {done.oldest_version}"
            )
        self.groups.finish(group, done.scores, frames, now_s)
        in_a_row = self.groups.num_zero_signal_in_a_row
        if in_a_row >= self._settings.max_zero_signal_in_a_row:
            raise NoProgressError(
                f"{in_a_row} groups in a row had only equal scores "
                "(pipeline.max_zero_signal_in_a_row): the task is too hard or too easy for this "
                "model, so there is nothing to learn from; change its difficulty or group_size"
            )

    def from_learner(self, peer: Peer, message: Message, now_s: float) -> None:
        """Book what the learner says.

        Raises:
            ProtocolError: it is out of step with the ledger.
        """
        match message:
            case WantBatch(step=step):
                self._check_step(step)
                if self.want_step is None:
                    self.want_step_since_s = now_s
                self.want_step = step
            case SetStaleness(max_staleness=bound):
                self._set_bound(bound)
            case Announcement():
                self._check_announcement(message)
                self.newest = message
            case WantEval(version=version):
                self._want_eval = version
            case _:
                raise ProtocolError(f"a learner may not send {message.kind!r} to the broker")
        self._learner = peer.sender

    def _set_bound(self, bound: int) -> None:
        try:
            self.groups.ledger.set_bound(bound)
        except ValueError as error:
            raise ProtocolError(str(error)) from error

    def _check_step(self, step: int) -> None:
        version = self.groups.ledger.version
        if step != version:
            raise ProtocolError(
                f"the learner asks for step {step}, the ledger is at step {version}"
            )
        if step >= self._settings.num_steps:
            raise ProtocolError(
                f"the learner asks for step {step}, the last one is {self._settings.num_steps - 1} "
                "(pipeline.num_steps)"
            )

    def _check_announcement(self, message: Announcement) -> None:
        offered = (message.epoch, message.version)
        known = (self.newest.epoch, self.newest.version) if self.newest is not None else None
        if message.epoch != self.number or offered > self.weights:
            raise ProtocolError(
                f"announced (epoch, version) {offered}, the ledger is at {self.weights}"
            )
        if known is not None and offered <= known:
            raise ProtocolError(f"announced (epoch, version) {offered} after {known}")

    def generator_left(self, sender: bytes) -> None:
        """Its unfinished groups are lost attempts, its evaluation is due again."""
        for group_id in self.groups.unfinished(sender):
            self.groups.fail(group_id, retry=True, reason="generator_lost")
        self._evals.lost(sender)

    def expire(self, now_s: float) -> None:
        """Groups that take longer than `group_timeout_s` are lost attempts."""
        for group_id in self.groups.overdue(now_s):
            log.warning(
                "group %d took longer than pipeline.group_timeout_s=%g and is lost",
                group_id,
                self._settings.group_timeout_s,
            )
            self.groups.fail(group_id, retry=True, reason="timeout")

    def beat(self, peer: Peer) -> list[Outgoing]:
        """The control facts that a busy generator, without an open request, has not been told."""
        return self._offer_eval(peer) + self._offer_weights(peer)

    def settle(self, now_s: float) -> list[Outgoing]:
        """Answer what can be answered."""
        out = self._answer_batch(now_s) + self._answer_eval()
        for peer in self._peers.asking:
            out += self._answer_request(peer, now_s)
        return out

    def _answer_batch(self, now_s: float) -> list[Outgoing]:
        if self.want_step is None:
            return []
        groups = self.groups.take()
        if groups is None:
            return []
        refs = []
        for group in groups:
            assert group.finished_s is not None, "the ledger takes finished groups only"
            refs.append(
                GroupRef(
                    group_id=group.start.group_id,
                    generator=group.holder_name,
                    num_frames=len(group.frames),
                    queued_s=now_s - group.finished_s,
                )
            )
        batch = Batch(
            step=self.want_step,
            groups=refs,
            max_staleness=max(group.promise for group in groups),
            cursor=self.groups.cursor,
            ledger=self.groups.counts(),
            counters=self._peers.counters(),
            evals=self._evals.drain(),
        )
        self.want_step = None
        return [Outgoing(self._learner, batch, [f for group in groups for f in group.frames])]

    def _answer_eval(self) -> list[Outgoing]:
        if self._want_eval is None or not self._evals.has_reached(self._want_eval):
            return []
        self._want_eval = None
        return [Outgoing(self._learner, EvalResults(evals=self._evals.drain()))]

    def _answer_request(self, peer: Peer, now_s: float) -> list[Outgoing]:
        request = peer.request
        assert request is not None, "only generators that ask are answered"
        out = self._offer_eval(peer)
        if news := self._offer_weights(peer):
            peer.request = None
            return out + news
        if not self._may_sample(peer):
            return out
        sharing = len(self._peers.asking)
        num_groups = min(request.num_groups, self.groups.room(request.version, sharing=sharing))
        if num_groups > 0:
            starts = self.groups.start(
                num_groups,
                version=request.version,
                holder=peer.sender,
                holder_name=peer.name,
                now_s=now_s,
            )
            peer.request = None
            out.append(Outgoing(peer.sender, Work(starts=starts)))
        return out

    def _offer_eval(self, peer: Peer) -> list[Outgoing]:
        """Evaluate, if one is due under what the peer surely holds."""
        if peer.holds is None or peer.offered or peer.is_evaluating:
            return []
        if not self._may_sample(peer):
            return []
        version = peer.holds[1]
        if not self._evals.is_due(version):
            return []
        self._evals.assign(peer.sender, version)
        peer.is_evaluating = True
        return [Outgoing(peer.sender, Evaluate(version=version))]

    def _offer_weights(self, peer: Peer) -> list[Outgoing]:
        """The newest Announcement, once to each peer."""
        if self.newest is None:
            return []
        offer = (self.newest.epoch, self.newest.version)
        if any(weights >= offer for weights in peer.may_hold):
            return []
        peer.offered.append(offer)
        return [Outgoing(peer.sender, self.newest)]

    def _may_sample(self, peer: Peer) -> bool:
        """Whether all weights that the peer may hold by now are of this epoch's history."""
        return all(epoch == self.number or version == 0 for epoch, version in peer.may_hold)
