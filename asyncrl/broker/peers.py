"""Who is here: one entry a peer, found by its socket identity, unique by name.

(epoch, version) names a set of weights. A generator holds what it reported last, or by now any of
those that it was offered since; it never goes back.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import Buffer

from asyncrl.wire.messages import Message, Role, WantWork

Weights = tuple[int, int]
"""(epoch, version); ordered, because the epoch rises when a learner returns at a lower version."""


class Outgoing(NamedTuple):
    """A message to be sent, with the payload frames behind it."""

    receiver: bytes
    message: Message
    frames: Sequence[Buffer] = ()


@dataclass(slots=True)
class Peer:
    """A generator or learner that was welcomed."""

    sender: bytes
    role: Role
    name: str
    heard_s: float
    """When its last message came."""

    incarnation: int = 0

    holds: Weights | None = None
    """What it reported last; generators only."""

    offered: list[Weights] = field(default_factory=list)
    """What it was told of and has not reported yet, oldest first."""

    is_evaluating: bool = False
    """From Evaluate to EvalDone, also if a learner came and went between."""

    request: WantWork | None = None
    """Its open request for work."""

    requested_s: float = 0.0
    """When it asked; earlier requests are served first."""

    counters: Mapping[str, float] = field(default_factory=dict)

    def reports(self, weights: Weights) -> None:
        """It samples under `weights` now, so older offers are history."""
        self.holds = weights
        self.offered = [offer for offer in self.offered if offer > weights]

    @property
    def may_hold(self) -> list[Weights]:
        """All weights that it may sample under by now, oldest first."""
        return [self.holds, *self.offered] if self.holds is not None else self.offered


class Peers:
    """The registry."""

    def __init__(self) -> None:
        self._by_sender: dict[bytes, Peer] = {}
        self._left: dict[str, float] = defaultdict(float)  # counters of generators that are gone
        self.num_generators_ever = 0
        self.broker_counters: Mapping[str, float] = {}
        """Running totals of the broker itself, kept up to date by its loop."""

    def __iter__(self) -> Iterator[Peer]:
        """All peers, also while some are removed."""
        return iter(list(self._by_sender.values()))

    def __len__(self) -> int:
        return len(self._by_sender)

    def get(self, sender: bytes) -> Peer | None:
        """The peer behind a socket identity."""
        return self._by_sender.get(sender)

    def add(self, peer: Peer) -> None:
        """Welcome a peer; its sender and name must be free."""
        self._by_sender[peer.sender] = peer
        self.num_generators_ever += peer.role == "generator"

    def remove(self, peer: Peer) -> None:
        """Forget a peer but not what it counted."""
        del self._by_sender[peer.sender]
        for name, value in peer.counters.items():
            self._left[name] += value

    def named(self, name: str) -> Peer | None:
        """The living peer of that name."""
        return next((p for p in self._by_sender.values() if p.name == name), None)

    @property
    def learner(self) -> Peer | None:
        """The living learner."""
        return next((p for p in self._by_sender.values() if p.role == "learner"), None)

    @property
    def generators(self) -> list[Peer]:
        """Living generators, in the order in which they joined."""
        return [p for p in self._by_sender.values() if p.role == "generator"]

    @property
    def asking(self) -> list[Peer]:
        """Generators with an open request for work, longest waiting first."""
        asking = [p for p in self._by_sender.values() if p.request is not None]
        return sorted(asking, key=lambda p: p.requested_s)

    def silent(self, now_s: float, silence_s: float) -> list[Peer]:
        """Peers not heard for longer than `silence_s`."""
        return [p for p in self._by_sender.values() if now_s - p.heard_s > silence_s]

    def counters(self) -> dict[str, float]:
        """Running totals over all generators, those that are gone included, and the broker's."""
        totals = {**self._left, **self.broker_counters}
        for peer in self._by_sender.values():
            for name, value in peer.counters.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals
