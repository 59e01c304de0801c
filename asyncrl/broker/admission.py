"""Bounded staleness as bookkeeping: who may start a group, and which groups a step takes.

G = groups per step, k = the staleness bound in force, version v = optimizer steps behind a set of
weights. Step s takes the first G surviving groups in order of admission (FIFO) and turns version s
into s + 1.

Rule. A generator that holds version v <= the ledger's version may start a group only while

    admitted - dropped < (v + k + 1) * G.

Claim: a group that starts at v under the bound k is trained at a step s with 0 <= s - v <= k. The bound
at its admission is its promise; it holds whatever becomes of the bound afterwards.

Proof. Let c = admitted - dropped at its admission. Every survivor so far was admitted before it, so
it is survivor number c (counted from 0). Later admissions come behind it and drops only lower its
number; steps take survivors in order, G at a time, so the step that takes it is at most
floor(c / G) <= v + k. Nothing here depends on which bound other groups were admitted under, before
or after: they only ever stand before it, counted in c, or behind it. It is trained at the ledger's
version or later, which is at least v. Its tokens are sampled at v or later, and at a version that
exists when it is trained: the promise holds for every token, queue time included.

The bound may move within [0, max_staleness], so no promise exceeds the configured one. Raising it
admits at once; lowering it takes nothing back, it only stops admission until the charge fits.

No deadlock. If step s lacks a group, then fewer than G groups are open and c < (s + 1) * G, so a
generator that holds s has credit under every bound, also k = 0.

A resume at version c starts with admitted = trained = c * G: the books of the surviving history.
Credits are never counted up and down; they follow from the open groups, so none can leak:

    admitted - dropped = version * G + open groups.

No I/O, no clock: every transition is a method call.
"""

from itertools import islice
from typing import Literal

from asyncrl.errors import StaleRolloutError
from asyncrl.wire.messages import LedgerCounts

DropCause = Literal["stale", "filtered", "failed"]


class Admission:
    """Ledger of started groups, of one epoch of the learner."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, version: int = 0) -> None:
        """Start at `version`: 0 for a fresh run, the checkpoint's version on resume.

        Raises:
            ValueError: groups_per_step < 1, max_staleness < 0 or version < 0.
        """
        if groups_per_step < 1:
            raise ValueError(f"pipeline.groups_per_step must be >= 1, got {groups_per_step}")
        if max_staleness < 0:
            raise ValueError(
                f"pipeline.max_staleness must be >= 0 (0 is synchronous), got {max_staleness}"
            )
        if version < 0:
            raise ValueError(f"version must be >= 0, got {version}")
        self._groups_per_step = groups_per_step
        self._max_staleness = self._bound = max_staleness
        self._version = version
        self._finished: dict[int, bool] = {}  # open groups in order of admission
        self._num_queued = 0
        self._num_admitted = self._num_trained = version * groups_per_step
        self._num_dropped: dict[DropCause, int] = {"stale": 0, "filtered": 0, "failed": 0}

    @property
    def version(self) -> int:
        """The version that the next step trains: steps taken so far."""
        return self._version

    @property
    def num_open(self) -> int:
        """Groups admitted and neither dropped nor taken."""
        return len(self._finished)

    @property
    def bound(self) -> int:
        """The bound in force; the configured max_staleness at first."""
        return self._bound

    @property
    def charged(self) -> int:
        """Survivors of the whole history: admitted - dropped."""
        return self._version * self._groups_per_step + len(self._finished)

    def set_bound(self, max_staleness: int) -> None:
        """From now on groups are admitted under this bound; open ones keep their promise.

        Raises:
            ValueError: it lies outside 0 .. the configured max_staleness.
        """
        if not 0 <= max_staleness <= self._max_staleness:
            raise ValueError(
                f"a staleness bound of {max_staleness} was asked for, the run allows 0.."
                f"{self._max_staleness} (pipeline.max_staleness)"
            )
        self._bound = max_staleness

    def credits(self, version: int) -> int:
        """How many groups a generator holding `version` may start now.

        0 for a version that no step has produced yet.
        """
        if version > self._version:
            return 0
        limit = (version + self._bound + 1) * self._groups_per_step
        return max(0, limit - self.charged)

    def admit(self, group_id: int, version: int) -> None:
        """Charge one credit for a group that starts sampling at `version`.

        Raises:
            StaleRolloutError: `version` has no credit.
            ValueError: the group is open already.
        """
        if self.credits(version) == 0:
            raise StaleRolloutError(
                f"group {group_id} has no credit at version {version}: {self.charged} charged, the "
                f"ledger is at version {self._version}, staleness bound {self._bound} of "
                f"max_staleness={self._max_staleness}, "
                f"groups_per_step={self._groups_per_step}"
            )
        if group_id in self._finished:
            raise ValueError(f"group {group_id} is admitted already")
        self._finished[group_id] = False
        self._num_admitted += 1

    def finish(self, group_id: int) -> None:
        """The group is scored and may be trained.

        Raises:
            KeyError: the group is not open.
            ValueError: it is finished already.
        """
        if self._finished[group_id]:
            raise ValueError(f"group {group_id} is finished already")
        self._finished[group_id] = True
        self._num_queued += 1

    def drop(self, group_id: int, cause: DropCause) -> None:
        """The group leaves untrained and its credit returns.

        Raises:
            KeyError: the group is not open.
        """
        self._num_queued -= self._finished.pop(group_id)
        self._num_dropped[cause] += 1

    def missing(self) -> list[int]:
        """Open groups of the next step that are not finished, oldest first."""
        return [g for g, done in islice(self._finished.items(), self._groups_per_step) if not done]

    def take(self) -> list[int] | None:
        """Group ids of the next step, oldest first; None while it lacks a finished group."""
        if self._num_queued < self._groups_per_step or self.missing():
            return None
        batch = list(islice(self._finished, self._groups_per_step))
        for group_id in batch:
            del self._finished[group_id]
        self._num_queued -= len(batch)
        self._num_trained += len(batch)
        self._version += 1
        return batch

    def counts(self) -> LedgerCounts:
        """The books; they balance at every moment (messages.LedgerCounts)."""
        return LedgerCounts(
            admitted=self._num_admitted,
            trained=self._num_trained,
            dropped_stale=self._num_dropped["stale"],
            dropped_filtered=self._num_dropped["filtered"],
            failed=self._num_dropped["failed"],
            queued=self._num_queued,
            in_flight=len(self._finished) - self._num_queued,
        )
