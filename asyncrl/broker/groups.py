"""Every group between admission and training: its prompt, its holder, its payload, its charge.

A prompt is an ordinal of the training stream. Each ordinal below the next new one is in exactly
one place: trained, given up, filtered, open (started, perhaps finished), or waiting for another
attempt.
A lost attempt goes to the front of the queue as `attempt + 1`, until `max_attempts`.

How attempts count in the ledger: every attempt is a group with an id of its own and one `admitted`;
a lost one counts once in `failed`, whether or not its prompt is started again.

Payload frames are opaque: kept as they came, handed on as they are.
"""

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Buffer

from asyncrl.broker.admission import Admission
from asyncrl.broker.journal import Drop, DropReason, Journal
from asyncrl.broker.settings import Settings
from asyncrl.scores import judge
from asyncrl.wire.messages import GroupStart, Hello, LedgerCounts


def derive_seed(run_seed: int, group_id: int, attempt: int) -> int:
    """Seed of one attempt, in [0, 2**63): blake2b of the three numbers, 8 bytes big-endian each.

    The arguments lie in [0, 2**64). A pure function: a group's seed depends on nothing else.
    """
    key = b"".join(value.to_bytes(8, "big") for value in (run_seed, group_id, attempt))
    digest = hashlib.blake2b(key, digest_size=8, person=b"asyncrl-seed").digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True)
class Group:
    """One open group."""

    start: GroupStart
    version: int
    """What the generator held when the group was handed to it."""

    promise: int
    """The staleness bound in force at that moment: it is trained no later than version + promise."""

    holder: bytes
    holder_name: str
    started_s: float
    finished_s: float | None = None
    frames: Sequence[Buffer] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the payload held here."""
        return sum(memoryview(frame).nbytes for frame in self.frames)


class Groups:
    """The groups of one epoch. Built when a learner joins, replaced when it comes back."""

    def __init__(
        self, settings: Settings, journal: Journal, *, learner: Hello, first_id: int
    ) -> None:
        """Empty books at the learner's version, prompts from its cursor, group ids from `first_id`."""
        self.ledger = Admission(
            groups_per_step=settings.groups_per_step,
            max_staleness=settings.max_staleness,
            version=learner.version,
        )
        self.next_id = first_id
        self.queued_bytes = 0
        self.num_zero_signal_in_a_row = 0
        self._settings = settings
        self._journal = journal
        self._next_ordinal = learner.cursor
        self._retries: deque[tuple[int, int]] = deque()  # (ordinal, attempt)
        self._open: dict[int, Group] = {}
        dropped = journal.opened(
            epoch=learner.epoch, version=learner.version, cursor=learner.cursor
        )
        self._filtered_before = dropped.get("zero_signal", 0)
        self._failed_before = sum(dropped.values()) - self._filtered_before

    def room(self, version: int, *, sharing: int = 1) -> int:
        """How many groups a generator holding `version` may start now, one of `sharing` who ask.

        The least of its credits, of what `depth` steps' worth of open groups leaves, of what the
        remaining steps can still train, and, while finished payloads exceed the byte budget, of
        what the next step lacks: that much is always let in, because only a step frees memory. Of
        this its part, rounded up: an engine that took all would leave the others idle.
        """
        settings = self._settings
        room = min(
            self.ledger.credits(version),
            settings.depth * settings.groups_per_step - self.ledger.num_open,
            settings.num_steps * settings.groups_per_step - self.ledger.charged,
        )
        if self.queued_bytes > settings.max_queue_bytes:
            room = min(room, settings.groups_per_step - self.ledger.num_open)
        return max(0, math.ceil(room / sharing))

    def start(
        self, num_groups: int, *, version: int, holder: bytes, holder_name: str, now_s: float
    ) -> list[GroupStart]:
        """Admit `num_groups` (at most `room(version)`): lost prompts first, then new ones."""
        starts = []
        for _ in range(num_groups):
            if self._retries:
                ordinal, attempt = self._retries.popleft()
            else:
                ordinal, attempt = self._next_ordinal, 0
                self._next_ordinal += 1
            group_id = self.next_id
            self.next_id += 1
            seed = derive_seed(self._settings.seed, group_id, attempt)
            start = GroupStart(group_id=group_id, ordinal=ordinal, attempt=attempt, seed=seed)
            self.ledger.admit(group_id, version)
            promise = self.ledger.bound
            self._open[group_id] = Group(start, version, promise, holder, holder_name, now_s)
            self._journal.admitted(start, version)
            starts.append(start)
        return starts

    def held(self, group_id: int, holder: bytes) -> Group | None:
        """The group, if `holder` is sampling it; None if it was lost, finished or never its own."""
        group = self._open.get(group_id)
        if group is None or group.holder != holder or group.finished_s is not None:
            return None
        return group

    def finish(
        self, group: Group, scores: Sequence[float | None], frames: Sequence[Buffer], now_s: float
    ) -> None:
        """A held group came back: queue it, try it again (unscored) or filter it (zero signal)."""
        verdict = judge(scores)
        group_id = group.start.group_id
        if verdict == "unscored":
            self.fail(group_id, retry=True, reason="unscored")
            return
        if verdict == "signal":
            self.num_zero_signal_in_a_row = 0
        elif self._settings.zero_signal == "drop":
            self.num_zero_signal_in_a_row += 1
            del self._open[group_id]
            self.ledger.drop(group_id, "filtered")
            self._report_drop(group, "zero_signal", again=False, scores=scores, frames=frames)
            return
        group.finished_s = now_s
        group.frames = frames
        self.queued_bytes += group.num_bytes
        self.ledger.finish(group_id)
        self._journal.finished(group_id, frames)

    def fail(self, group_id: int, *, retry: bool, reason: DropReason) -> None:
        """An unfinished group is lost; its prompt is tried again (if it may) or given up."""
        group = self._open.pop(group_id)
        self.ledger.drop(group_id, "failed")
        next_attempt = group.start.attempt + 1
        again = retry and next_attempt < self._settings.max_attempts
        self._report_drop(group, reason, again=again)
        if again:
            self._retries.appendleft((group.start.ordinal, next_attempt))

    def _report_drop(
        self,
        group: Group,
        reason: DropReason,
        *,
        again: bool,
        scores: Sequence[float | None] = (),
        frames: Sequence[Buffer] = (),
    ) -> None:
        self._journal.dropped(
            Drop(
                start=group.start, reason=reason, version=self.ledger.version,
                holder=group.holder_name, again=again, scores=scores, frames=frames,
            )
        )  # fmt: skip

    def unfinished(self, holder: bytes) -> list[int]:
        """Ids that `holder` is sampling, newest first: failed in this order, the oldest is retried
        first.
        """
        ids = [i for i, g in self._open.items() if g.holder == holder and g.finished_s is None]
        return ids[::-1]

    def overdue(self, now_s: float) -> list[int]:
        """Unfinished ids that were started `group_timeout_s` ago or longer, newest first."""
        limit_s = now_s - self._settings.group_timeout_s
        ids = [i for i, g in self._open.items() if g.finished_s is None and g.started_s <= limit_s]
        return ids[::-1]

    def take(self) -> list[Group] | None:
        """The groups of the next step in order of admission; None until all are finished."""
        step = self.ledger.version
        group_ids = self.ledger.take()
        if group_ids is None:
            return None
        groups = [self._open.pop(group_id) for group_id in group_ids]
        self.queued_bytes -= sum(group.num_bytes for group in groups)
        self._journal.trained(step, group_ids)
        return groups

    @property
    def cursor(self) -> int:
        """Smallest ordinal that is not trained, filtered or given up."""
        waiting = [ordinal for ordinal, _ in self._retries]
        started = [group.start.ordinal for group in self._open.values()]
        return min(waiting + started, default=self._next_ordinal)

    def counts(self) -> LedgerCounts:
        """The books of the whole run: the ledger's, and what earlier epochs dropped before it.

        They balance as the ledger's do. Admission never sees these drops, and need not: they are in both
        terms of its admitted - dropped.
        """
        counts = self.ledger.counts()
        return counts.model_copy(
            update={
                "admitted": counts.admitted + self._filtered_before + self._failed_before,
                "dropped_filtered": counts.dropped_filtered + self._filtered_before,
                "failed": counts.failed + self._failed_before,
            }
        )

    def missing_text(self, now_s: float) -> str:
        """What the next step lacks: ids, holders and since when; "" if nothing."""
        parts = []
        for group_id in self.ledger.missing():
            group = self._open[group_id]
            since_s = now_s - group.started_s
            parts.append(f"group {group_id} at {group.holder_name} since {since_s:.0f} s")
        num_unstarted = self._settings.groups_per_step - self.ledger.num_open
        if num_unstarted > 0:
            parts.append(f"{num_unstarted} not started")
        return ", ".join(parts)
