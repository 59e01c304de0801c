"""Pure functions over tensors: losses, corrections, advantages, diagnostics. Nothing of ours is imported.

The registries are read by name from the config: `algorithm.loss.kind`, `algorithm.advantage` and
`algorithm.aggregation`.
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
from asyncrl.algo.aggregation import (
    Aggregation,
    Scales,
    constant_length,
    prompt_mean,
    sequence_mean,
    token_mean,
)
from asyncrl.algo.behaviour_clipped import behaviour_clipped_loss
from asyncrl.algo.cispo import cispo_loss
from asyncrl.algo.clipped import clipped_loss
from asyncrl.algo.dppo import dppo_loss
from asyncrl.algo.gspo import gspo_loss
from asyncrl.algo.m2po import m2po_loss
from asyncrl.algo.reinforce import reinforce_loss
from asyncrl.algo.sapo import sapo_loss
from asyncrl.algo.squared_log_ratio import squared_log_ratio_loss
from asyncrl.algo.tokens import TokenBatch
from asyncrl.algo.topr import topr_loss

__all__ = [
    "ADVANTAGES", "AGGREGATIONS", "LOSSES", "Advantage", "Aggregation", "Loss", "TokenBatch",
]  # fmt: skip

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(TokenBatch, num_tokens=N, settings...) -> (loss divided by N, sums by metric name)."""

LOSSES: dict[str, Loss] = {
    "clipped": clipped_loss,
    "behaviour_clipped": behaviour_clipped_loss,
    "reinforce": reinforce_loss,
    "cispo": cispo_loss,
    "gspo": gspo_loss,
    "sapo": sapo_loss,
    "dppo": dppo_loss,
    "topr": topr_loss,
    "m2po": m2po_loss,
    "squared_log_ratio": squared_log_ratio_loss,
}

AGGREGATIONS: dict[str, Callable[..., Scales]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant_length": constant_length,
    "prompt_mean": prompt_mean,
}
"""(lengths, prompts, constant=L) -> scales; an Aggregation once L is bound."""

ADVANTAGES: dict[str, Advantage] = {
    "mean_std": mean_std,
    "mean": mean,
    "leave_one_out": leave_one_out,
    "batch_std": batch_std,
    "length_weighted": length_weighted,
    "max_rl": max_rl,
    "raw": raw,
}
