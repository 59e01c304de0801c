"""The broker's memory across its own restarts: every transition of the ledger, in order.

`Broker` reports each transition here before anybody hears of it. `NullJournal` forgets them, so
with it a learner that returns at version c finds new groups instead of the same batches again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from typing_extensions import Buffer

from asyncrl.wire.messages import GroupStart

DropReason = Literal[
    "zero_signal", "unscored", "timeout", "generator_lost",
    "prompt_too_long", "all_unscored", "aborted", "bad_logprobs", "engine_error",
]  # fmt: skip
"""zero_signal: all scores were equal (pipeline.zero_signal="drop"); unscored: no score at all came back;
timeout: pipeline.group_timeout_s; generator_lost: its process left; the others: GroupFailed.reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A group that left untrained."""

    start: GroupStart
    reason: DropReason
    version: int
    """What the next step trains."""

    holder: str
    """Name of the generator."""

    again: bool
    """Whether its prompt is started again."""

    scores: Sequence[float | None] = ()
    frames: Sequence[Buffer] = ()
    """Payload of a group that was finished, opaque; empty if there is none."""


class Journal(Protocol):
    """Receives the transitions; an implementation must have stored them when it returns."""

    def opened(self, *, epoch: int, version: int, cursor: int) -> Mapping[DropReason, int]:
        """A learner joined; the ledger starts anew at `version`, prompts at ordinal `cursor`.

        Returns how many groups were dropped before `version`, by reason, as far as it remembers.
        """

    def admitted(self, start: GroupStart, version: int) -> None:
        """A group was handed to a generator holding `version`."""

    def finished(self, group_id: int, frames: Sequence[Buffer]) -> None:
        """A scored group was queued with its payload."""

    def dropped(self, drop: Drop) -> None:
        """A group left untrained."""

    def trained(self, step: int, group_ids: Sequence[int]) -> None:
        """The groups of `step` went to the learner, in this order."""


class NullJournal:
    """Remembers nothing."""

    def opened(self, *, epoch: int, version: int, cursor: int) -> Mapping[DropReason, int]:
        """See Journal."""
        return {}

    def admitted(self, start: GroupStart, version: int) -> None:
        """See Journal."""

    def finished(self, group_id: int, frames: Sequence[Buffer]) -> None:
        """See Journal."""

    def dropped(self, drop: Drop) -> None:
        """See Journal."""

    def trained(self, step: int, group_ids: Sequence[int]) -> None:
        """See Journal."""
