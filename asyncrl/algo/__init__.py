"""Pure functions over tensors: losses, advantages, diagnostics. Nothing of ours is imported here.

The registries are read by name from the config: `algorithm.loss.kind` and `algorithm.advantage`.
"""

from collections.abc import Callable

from torch import Tensor

from asyncrl.algo.advantages import Advantage, leave_one_out, mean, mean_std
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
}
