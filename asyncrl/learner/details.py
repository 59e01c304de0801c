"""What the learner made of single tokens: for the rollouts that rollouts.jsonl keeps token by token.

Every such token has one place in the step (batch.StepBatch.details) and goes through one micro-batch of
one rank; each rank fills its own places, and the ranks add up. Nothing waits for the device before
`reduce`.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algo import TokenBatch
from asyncrl.learner.ranks import Ranks

MEASURED, PROXIMAL, WEIGHT = range(3)
"""Rows: 1 if the token went through the forward pass; log pi_prox in nats; weight after correction."""


class Details:
    """The tokens' table of one step on one rank."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        """Places for `num_tokens` tokens, none of them measured yet."""
        self._table = torch.zeros((3, num_tokens), dtype=torch.float32, device=device)

    @torch.no_grad()
    def add(self, places: NDArray[np.int64], tokens: TokenBatch, weights: Tensor) -> None:
        """Take one micro-batch: its tokens' places [T] (-1: not recorded), and the weights [T]."""
        chosen = np.flatnonzero(places >= 0)
        if not len(chosen):
            return
        device = self._table.device
        inside = torch.from_numpy(chosen).to(device, non_blocking=True)
        where = torch.from_numpy(places[chosen]).to(device, non_blocking=True)
        values = torch.stack(
            [torch.ones_like(weights), tokens.proximal_logprobs, weights], dim=0
        ).float()
        self._table[:, where] = values[:, inside]

    def reduce(self, ranks: Ranks) -> NDArray[np.float64]:
        """[3, tokens] over all ranks; every rank must call it."""
        return ranks.all_reduce_tables({"details": self._table})["details"]
