"""What every loss is guarded by, so that no token can make it NaN without being seen.

| value                                          | what happens                                     |
|------------------------------------------------|--------------------------------------------------|
| anything where completion_mask is False        | never read: loss finite, gradient exactly 0      |
| behaviour log-prob not finite, inside the mask | drops out: weight 0, in no mean or sum; stays in N |
| a log-ratio beyond +-20, to be exponentiated   | clamped before exp (no gradient), counted        |
| the log-ratio of a whole completion            | its sum or mean is clamped, not its terms        |
| the learner's log-prob or an advantage is NaN  | propagates; the update is then skipped           |
| no token at all                                | 0, connected to the graph                        |

Inputs are cleaned, not outputs: where(mask, exp(x), 0) is finite and has a NaN gradient when x is not.
A behaviour log-prob of -inf says "impossible", so a weight of 1 would be wrong for it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.algo.tokens import TokenBatch

MAX_LOG_RATIO = 20.0
"""Nats; e^20 is far beyond any clip, and its square is still finite in float32."""


class CleanTokens(NamedTuple):
    """A micro-batch that may be read everywhere: [T] each, 0 at tokens that do not count."""

    counts: Tensor
    """bool; inside the mask, and sampled with a finite log-prob."""

    logprobs: Tensor
    """log pi_theta, differentiable."""

    proximal: Tensor
    """log pi_prox, constant."""

    behaviour: Tensor
    """log mu, constant."""

    advantages: Tensor
    weights: Tensor
    """scale * behaviour_weights, constant."""

    sequence: Tensor
    num_nonfinite: Tensor
    """Tokens inside the mask whose behaviour log-prob is not finite; a scalar."""


def clean(batch: TokenBatch) -> CleanTokens:
    """Drop what must not be read. A dropped token keeps its place, with 0 in every field."""
    finite = batch.behaviour_logprobs.isfinite()
    counts = batch.completion_mask & finite
    return CleanTokens(
        counts=counts,
        logprobs=batch.logprobs.where(counts, 0.0),
        proximal=batch.proximal_logprobs.detach().where(counts, 0.0),
        behaviour=batch.behaviour_logprobs.detach().where(counts, 0.0),
        advantages=batch.advantages.detach().where(counts, 0.0),
        weights=(batch.scale * batch.behaviour_weights).detach().where(counts, 0.0),
        sequence=batch.sequence,
        num_nonfinite=(batch.completion_mask & ~finite).sum(),
    )


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Exponential of the log-ratio, clamped to +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def num_beyond(log_ratio: Tensor) -> Tensor:
    """How many log-ratios bounded_exp clamps."""
    return (log_ratio.abs() > MAX_LOG_RATIO).sum()


def sum_by_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """[T] sum of `values` over the completion that each token belongs to.

    In float64, where ten thousand terms keep their digits; in the type of `values` afterwards.
    """
    # There are at most T completions: T slots hold them all, and nothing waits for the device.
    slots = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    return slots.index_add(0, sequence, values.double())[sequence].to(values.dtype)


def weighted_mean(
    tokens: CleanTokens, token_loss: Tensor, *, num_tokens: int, **sums: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a loss returns: 1/N sum_t weights_t l_t, and sums of the micro-batch by metric name.

    Args:
        tokens: the micro-batch.
        token_loss: [T] l_t.
        num_tokens: N of the whole update.
        sums: what this loss counts, named without its "ratio/".

    Returns:
        The scalar loss, and the sums: "loss/policy" is N times the loss.

    Raises:
        ValueError: num_tokens < 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must count the step's tokens, at least 1, got {num_tokens}")
    total = (tokens.weights * token_loss).sum()
    with torch.no_grad():
        counted = {f"ratio/{name}": value for name, value in sums.items()}
        counted |= {"loss/policy": total.detach(), "mismatch/nonfinite": tokens.num_nonfinite}
    return total / num_tokens, counted
