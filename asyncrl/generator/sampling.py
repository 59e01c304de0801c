"""Draw one token per row from its logits, and say what its log-probability was.

The distribution that is sampled is the one whose log-probability is returned:

    z = (logits - max) / temperature                    float32
    top-k:  keep z >= the k-th largest z
    top-p:  of those, keep the most likely ones until their share reaches p
    mu(i) = exp(z_i) / sum of exp(z_j) over kept j      log mu(i) = z_i - log of that sum

Tokens that tie with the last kept one are kept too: bfloat16 logits tie often, and which of the
tied would go depends on the device's sort. A token is drawn by inverse CDF from one uniform of the
caller, so a completion depends on its own stream alone. A token of probability zero is never drawn.
Shapes: B = rows, V = vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 128
"""Tokens of one block of the two-level cumulative sum: V sums become V / BLOCK."""


class CompletionStream:
    """Uniforms of one completion, one float64 in [0, 1) a token, keyed by (seed, index) alone."""

    def __init__(self, seed: int, index: int) -> None:
        """Start at the first token; `seed` and `index` are in 0 .. 2**64 - 1."""
        key = np.array([seed, index], dtype=np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=key))

    def next(self) -> float:
        """The uniform of the next token."""
        return float(self._generator.random())


def nonfinite_rows(logits: torch.Tensor) -> list[int]:
    """Rows of [B, V] logits that define no distribution: a NaN, a +inf, or only -inf."""
    # amax propagates NaN, so a finite maximum vouches for its row; single -inf have probability 0.
    return torch.nonzero(~torch.isfinite(logits.amax(dim=-1))).flatten().tolist()


def sample(
    logits: torch.Tensor,
    uniforms: NDArray[np.float64],
    *,
    temperature: NDArray[np.float64],
    top_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row; every row has its own settings.

    Args:
        logits: [B, V] float32, not changed.
        uniforms: [B] in [0, 1).
        temperature: [B] > 0.
        top_p: [B] in (0, 1]; 1 is off.
        top_k: [B] >= 0; 0 and anything from V on are off.

    Returns:
        Tokens [B] int64 and their log mu [B] float32 in nats, on the device of `logits`.

    Raises:
        ValueError: a row without a distribution, a uniform or a setting out of its range.
    """
    _check(logits, uniforms, temperature, top_p, top_k)
    rows, vocabulary = logits.shape
    maximum = logits.amax(dim=-1, keepdim=True)
    bad = torch.nonzero(~torch.isfinite(maximum[:, 0])).flatten().tolist()
    if bad:
        raise ValueError(f"row {bad[0]} of {rows} has NaN, +inf or only -inf logits")
    # A whole number of blocks; the tokens that fill the last one have probability 0.
    weights = logits.new_zeros(rows, -(-vocabulary // BLOCK) * BLOCK)
    weights_of_tokens = weights[:, :vocabulary]
    torch.sub(logits, maximum, out=weights_of_tokens)
    if (temperature != 1.0).any():
        weights_of_tokens.div_(_column(temperature, logits))
    weights_of_tokens.exp_()
    _cut_top_k(weights_of_tokens, top_k)
    _cut_top_p(weights_of_tokens, top_p)
    tokens, totals = _inverse_cdf(weights, torch.from_numpy(uniforms).to(logits.device))
    scores = (logits.gather(1, tokens[:, None]) - maximum) / _column(temperature, logits)
    return tokens, scores[:, 0] - totals.log().float()


def _check(
    logits: torch.Tensor,
    uniforms: NDArray[np.float64],
    temperature: NDArray[np.float64],
    top_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
) -> None:
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}")
    for name, values, valid, wanted in (
        ("uniform", uniforms, (uniforms >= 0.0) & (uniforms < 1.0), "in [0, 1)"),
        ("temperature", temperature, temperature > 0.0, "> 0 (greedy is top_k=1)"),
        ("top_p", top_p, (top_p > 0.0) & (top_p <= 1.0), "in (0, 1]"),
        ("top_k", top_k, top_k >= 0, ">= 0"),
    ):
        if values.shape != (logits.shape[0],):
            raise ValueError(f"{name} must be [{logits.shape[0]}], got {list(values.shape)}")
        if not valid.all():
            row = int(np.argmin(valid))
            raise ValueError(f"{name} of row {row} must be {wanted}, got {values[row]}")


def _column(values: NDArray[np.float64], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like)[:, None]


def _cut_top_k(weights: torch.Tensor, top_k: NDArray[np.int64]) -> None:
    """Set all but each row's top_k largest weights (and their ties) to zero, in place."""
    cut = np.flatnonzero((top_k > 0) & (top_k < weights.shape[1]))
    if cut.size == 0:
        return
    index = torch.from_numpy(cut).to(weights.device)
    part = weights[index]
    largest = part.topk(int(top_k[cut].max()), dim=-1).values
    last_kept = largest.gather(1, torch.from_numpy(top_k[cut] - 1).to(weights.device)[:, None])
    weights[index] = part.masked_fill_(part < last_kept, 0.0)


def _cut_top_p(weights: torch.Tensor, top_p: NDArray[np.float64]) -> None:
    """Set all weights after those that make up a share of top_p to zero, in place."""
    cut = np.flatnonzero(top_p < 1.0)
    if cut.size == 0:
        return
    index = torch.from_numpy(cut).to(weights.device)
    part = weights[index]
    ordered = part.sort(dim=-1, descending=True).values
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    wanted = torch.from_numpy(top_p[cut]).to(weights.device)[:, None] * cumulative[:, -1:]
    # The first token at which the share is reached is the last one kept.
    last = torch.searchsorted(cumulative, wanted)
    weights[index] = part.masked_fill_(part < ordered.gather(1, last), 0.0)


def _inverse_cdf(
    weights: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """First token whose cumulative weight exceeds uniform * total; tokens [B], totals [B] float64.

    Two levels: which block, then which token of the block, so that only sums of blocks are
    accumulated over the vocabulary.
    """
    blocks = weights.view(weights.shape[0], -1, BLOCK)
    cumulative = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(blocks.shape[0], device=weights.device), block[:, 0]]
    inside_cumulative = inside.cumsum(dim=-1, dtype=torch.float64)
    token = _first_above(inside_cumulative, target - before)
    return (block * BLOCK + token)[:, 0], cumulative[:, -1]


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index [B, 1] with cumulative > target, or, if rounding left none, the last that rises.

    Either way the cumulative sum rises at the index, so its weight is not zero.
    """
    above = torch.searchsorted(cumulative, target, right=True)
    last_rise = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(above, last_rise)
