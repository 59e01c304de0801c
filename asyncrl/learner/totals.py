"""What an update measures: sums added up over its micro-batches on the device, then over the ranks.

Nothing is divided here before everything was added, so that no number depends on how a step was cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algo import TokenBatch
from asyncrl.algo.diagnostics import Tables, describe, tabulate
from asyncrl.learner.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Measured:
    """The sums of one or several updates, over all ranks."""

    sums: dict[str, float]
    """By metric name."""

    tables: dict[str, NDArray[np.float64]]
    """By field of diagnostics.Tables; empty without diagnostics."""

    largest_mismatch: float

    @classmethod
    def total(cls, parts: Sequence["Measured"]) -> "Measured":
        """All of them together; they measured the same things."""
        first = parts[0]
        return cls(
            {name: sum(part.sums[name] for part in parts) for name in first.sums},
            {name: np.sum([part.tables[name] for part in parts], axis=0) for name in first.tables},
            max(part.largest_mismatch for part in parts),
        )

    def mismatch(self) -> dict[str, float]:
        """The metrics of algo/diagnostics.py; empty without diagnostics."""
        if not self.tables:
            return {}
        return describe(**self.tables) | {"mismatch/max": self.largest_mismatch}


class Totals:
    """Sums of one update on one rank."""

    def __init__(self, max_staleness: int | None, device: torch.device) -> None:
        """Without a `max_staleness` there are no diagnostics."""
        self._max_staleness = max_staleness
        self._sums: dict[str, Tensor] = {}
        self._tables: Tables | None = None
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, tokens: TokenBatch, sums: Mapping[str, Tensor], weights: Tensor) -> None:
        """One micro-batch: its tokens, its sums by metric name, and the correction's weights [T]."""
        for name, amount in sums.items():
            before = self._sums.get(name)
            self._sums[name] = amount.double() if before is None else before + amount
        if self._max_staleness is None:
            return
        tables, largest = tabulate(tokens, weights, max_staleness=self._max_staleness)
        if self._tables is not None:
            tables = Tables(*(a + b for a, b in zip(self._tables, tables, strict=True)))
        self._tables = tables
        self._largest = torch.maximum(self._largest, largest)

    def reduce(self, ranks: Ranks) -> Measured:
        """Over all ranks; each must have added at least one micro-batch."""
        tables = self._tables._asdict() if self._tables is not None else {}
        return Measured(
            ranks.all_reduce_sums(self._sums),
            ranks.all_reduce_tables(tables),
            ranks.all_reduce_maxima({"largest": self._largest})["largest"],
        )
