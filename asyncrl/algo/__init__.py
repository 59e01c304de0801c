"""Pure functions over tensors: losses, advantages, diagnostics. Nothing of ours is imported here.

The registries are read by name from the config: `algorithm.loss.kind` and `algorithm.advantage`.
"""

from collections.abc import Callable

from torch import Tensor

from asyncrl.algo.advantages import (
    Advantage,
    batch_std,
    leave_one_out,
    length_weighted,
    max_rl,
    mean,
    mean_std,
    raw,
)
from asyncrl.algo.clipped import clipped_loss
from asyncrl.algo.tokens import TokenBatch

__all__ = ["ADVANTAGES", "LOSSES", "Advantage", "Loss", "TokenBatch"]

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(TokenBatch, num_tokens=N, settings...) -> (loss divided by N, sums by metric name)."""

LOSSES: dict[str, Loss] = {"clipped": clipped_loss}

ADVANTAGES: dict[str, Advantage] = {
    "mean_std": mean_std,
    "mean": mean,
    "leave_one_out": leave_one_out,
    "batch_std": batch_std,
    "length_weighted": length_weighted,
    "max_rl": max_rl,
    "raw": raw,
}
