"""Rank 0's side of the broker: ask for batches ahead, wait with a name for what is waited for.

`want` is sent as soon as a step's number is known, so that the batch travels while the learner computes;
`take` then only waits for what is not there yet. Other ranks get the same bytes by broadcast.
"""

import logging
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.errors import NoProgressError, PeerLostError, ProtocolError
from asyncrl.learner.ranks import Ranks
from asyncrl.types import RolloutGroup
from asyncrl.wire import messages as m
from asyncrl.wire.codec import NUM_GROUP_FRAMES, decode_group
from asyncrl.wire.mailbox import Mailbox

log = logging.getLogger(__name__)

Awaited = TypeVar("Awaited", m.Batch, m.EvalResults)

_SAY_EVERY_S = 60.0
_BOUND = struct.Struct("<Q")
"""The batch's staleness bound, as the frame before its groups on the way to the other ranks."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The groups of one step; `batch` (ledger, counters, evaluations) is on rank 0 only."""

    groups: list[RolloutGroup]
    max_staleness: int
    """The largest bound that any of them was admitted under."""

    batch: m.Batch | None


class Inbox:
    """Batches and evaluation results, for every rank."""

    def __init__(self, mailbox: Mailbox | None, ranks: Ranks, *, no_progress_s: float) -> None:
        """`mailbox` on rank 0, None elsewhere."""
        self._mailbox = mailbox
        self._ranks = ranks
        self._no_progress_s = no_progress_s

    def want(self, step: int) -> None:
        """Ask for the batch of `step`; returns at once."""
        if self._mailbox is not None:
            self._mailbox.send(m.WantBatch(step=step))

    def set_staleness(self, max_staleness: int) -> None:
        """Groups that are admitted from now on get this bound; returns at once."""
        if self._mailbox is not None:
            self._mailbox.send(m.SetStaleness(max_staleness=max_staleness))

    def take(self, step: int) -> Delivery:
        """Wait for the batch of `step`, which was asked for.

        Raises:
            PeerLostError: the broker is gone, or it stopped the run because of a failure.
            NoProgressError: no batch within no_progress_s and a margin (the broker names the groups).
        """
        batch: m.Batch | None = None
        frames: Sequence[bytes] = ()
        if self._mailbox is not None:
            # The broker knows which groups are missing and speaks first; this is the second net.
            limit_s = self._no_progress_s * 1.2 + 10
            batch, views = self._await(m.Batch, limit_s, f"the batch of step {step}")
            if batch.step != step:
                raise ProtocolError(f"asked for the batch of step {step}, got step {batch.step}")
            frames = [_BOUND.pack(batch.max_staleness), *(bytes(view) for view in views)]
        if self._ranks.world > 1:
            frames = _split(self._ranks.broadcast_bytes(_join(frames)))
        (max_staleness,), frames = _BOUND.unpack(frames[0]), frames[1:]
        starts = range(0, len(frames), NUM_GROUP_FRAMES)
        groups = [decode_group(frames[start : start + NUM_GROUP_FRAMES]) for start in starts]
        return Delivery(groups, max_staleness, batch)

    def await_eval(self, version: int, deadline_s: float) -> list[m.EvalDone]:
        """Ask for and wait for the evaluation of `version`; [] on ranks other than 0."""
        if self._mailbox is None:
            return []
        self._mailbox.send(m.WantEval(version=version))
        results, _ = self._await(m.EvalResults, deadline_s, f"the evaluation of version {version}")
        return results.evals

    def _await(
        self, kind: type[Awaited], limit_s: float, what: str
    ) -> tuple[Awaited, list[memoryview]]:
        assert self._mailbox is not None
        start_s = said_s = time.monotonic()
        while True:
            envelope = self._mailbox.receive(1.0)
            if envelope is not None:
                message = envelope.message
                if isinstance(message, kind):
                    return message, envelope.frames
                _refuse(message)
            now_s = time.monotonic()
            if now_s - start_s > limit_s:
                raise NoProgressError(f"{what} did not come within {limit_s:.0f} s")
            if now_s - said_s > _SAY_EVERY_S:
                said_s = now_s
                log.info("waiting for %s since %.0f s", what, now_s - start_s)


def _refuse(message: m.Message) -> None:
    """Anything but the awaited answer ends the run, with the broker's own words."""
    match message:
        case m.Stop(reason=reason) | m.Refuse(reason=reason):
            raise PeerLostError(f"the broker stopped the run: {reason}")
        case _:
            raise ProtocolError(f"a learner does not expect {message.kind!r} from the broker")


def _join(frames: Sequence[bytes]) -> bytes:
    head = struct.pack(f"<I{len(frames)}Q", len(frames), *(len(frame) for frame in frames))
    return b"".join([head, *frames])


def _split(blob: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<I", blob)
    lengths = struct.unpack_from(f"<{count}Q", blob, 4)
    position, frames = 4 + 8 * count, []
    for length in lengths:
        frames.append(blob[position : position + length])
        position += length
    return frames
