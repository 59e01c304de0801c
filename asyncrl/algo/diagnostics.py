"""How far the learner's policy is from the one that sampled, by staleness.

    y = log pi_prox - log mu, per token;  rho = e^y;  w = the weight that the loss really used

| metric, "@d": at staleness d | over tokens                             | tells                        |
|------------------------------|-----------------------------------------|------------------------------|
| mismatch/k1                  | mean of -y                              | KL(mu, pi), signed           |
| mismatch/k3                  | mean of e^y - 1 - y                     | the same, >= 0, low variance |
| mismatch/abs, abs_p99        | mean and 99 % quantile of |y|           | size of the difference       |
| mismatch/exp_abs             | mean of e^|y|                           | relative divergence, plus 1  |
| mismatch/chi2                | mean of rho^2, minus 1                  | variance of the weights      |
| mismatch/ess                 | (sum rho)^2 / (n sum rho^2)             | effective share of tokens    |
| mismatch/ratio_p1, p50, p99  | quantiles of rho                        | tails                        |
| correction/ess, weight_p1 .. | (sum w)^2 / (n sum w^2), quantiles of w | after caps and masks         |
| mismatch/max                 | largest |y| over all                    |
| mismatch/k3_numerics         | k3 of completions wholly at staleness 0 | engine against learner       |

| by a completion's oldest token | over completions, Y = its sum of y   | tells                        |
|--------------------------------|--------------------------------------|------------------------------|
| mismatch/ppl_gap, ppl_ratio    | mean of -Y/T, and of e^(-Y/T)        | perplexity, learner's / mu's |
| mismatch/sequence_chi2, _ess   | as above with e^Y, Y clamped to +-20 | what sequence weights face   |
| staleness/span                 | newest minus oldest version, mean    | updates during sampling      |

A token at d = 0 was sampled under the learner's weights. Where its completion began under older ones, the
engine still had their keys and values (engine.cache_policy="keep", and the embedded engine), which the
learner's full pass does not: only of completions that saw no other version y is numerics alone.
drift/k3 is k3 over the stale tokens minus k3 at 0: what the policy's own movement adds (k3 is y^2/2 to
second order, and independent differences add up in it).

A micro-batch leaves `Tables` of sums, which add up over micro-batches and ranks; `describe` divides
once. Quantiles come from histograms of y, for the same reason: exact to 2 % of y, or 2e-5 near 0.
Tokens whose behaviour log-prob is not finite are left out (the loss counts them).

Sources: k1 and k3, joschu.net/blog/kl-approx.html; ESS, Kong 1992.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algo.guards import MAX_LOG_RATIO, bounded_exp
from asyncrl.algo.tokens import TokenBatch

TOKEN_SUMS = (
    "tokens", "k1", "k3", "abs", "exp_abs", "ratio", "ratio_squared", "weight", "weight_squared",
    "pure_tokens", "pure_k3",
)  # fmt: skip
SEQUENCE_SUMS = ("sequences", "ppl_gap", "ppl_ratio", "ratio", "ratio_squared", "span")

HALF_BINS = 256
"""Histograms: bins -HALF..HALF of asinh(y / FINEST), so that they are finest around 0."""

FINEST = 1e-3
_BINS_PER_UNIT = HALF_BINS / math.asinh(MAX_LOG_RATIO / FINEST)


class Tables(NamedTuple):
    """Sums over tokens and completions, by staleness bucket 0..k; float64."""

    tokens: Tensor
    """[k + 1, TOKEN_SUMS]"""

    sequences: Tensor
    """[k + 1, SEQUENCE_SUMS]"""

    ratios: Tensor
    """[k + 1, bins] tokens by y."""

    weights: Tensor
    """[bins] tokens by log w, weight 0 in the lowest."""


@torch.no_grad()
def tabulate(batch: TokenBatch, weights: Tensor, *, max_staleness: int) -> tuple[Tables, Tensor]:
    """Tables of one micro-batch, and its largest |y| (0 without tokens).

    Args:
        batch: the micro-batch; its behaviour_weights are not read.
        weights: [T] what the loss used in their place.
        max_staleness: k; the largest staleness in the batch at most.
    """
    valid = batch.completion_mask & batch.behaviour_logprobs.isfinite()
    y = (batch.proximal_logprobs - batch.behaviour_logprobs).where(valid, 0.0).double()
    bucket = batch.staleness.long()
    num_buckets = max_staleness + 1
    bins = _bin(y)
    outside = num_buckets * NUM_BINS
    cell = (bucket * NUM_BINS + bins).where(valid, outside)
    ones = torch.ones_like(y)
    ratios = y.new_zeros(outside + 1).index_add_(0, cell, ones)[:outside]
    applied = _bin(weights.double().log()).where(valid, NUM_BINS)
    tables = Tables(
        tokens=_by_bucket(
            _token_features(y, weights.double(), _is_pure(batch)), bucket, valid, num_buckets
        ),
        sequences=_sequences(batch, y, valid, num_buckets),
        ratios=ratios.view(num_buckets, NUM_BINS),
        weights=y.new_zeros(NUM_BINS + 1).index_add_(0, applied, ones)[:NUM_BINS],
    )
    return tables, y.abs().max() if len(y) else y.new_zeros(())


def _is_pure(batch: TokenBatch) -> Tensor:
    """[T] 1 for the tokens of completions that were sampled at staleness 0 from first to last."""
    stale = (batch.completion_mask & (batch.staleness > 0)).double()
    num_stale = stale.new_zeros(len(stale)).index_add_(0, batch.sequence, stale)
    return (num_stale[batch.sequence] == 0).double()


def _token_features(y: Tensor, weights: Tensor, pure: Tensor) -> Tensor:
    """[T, TOKEN_SUMS]"""
    clamped = y.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = clamped.exp()
    # expm1: e^y - 1 cancels near 0, where healthy runs are.
    k3 = clamped.expm1() - clamped
    columns = [
        torch.ones_like(y), -y, k3, y.abs(), clamped.abs().exp(), ratio, ratio.square(),
        weights, weights.square(), pure, pure * k3,
    ]  # fmt: skip
    return torch.stack(columns, dim=1)


def _sequences(batch: TokenBatch, y: Tensor, valid: Tensor, num_buckets: int) -> Tensor:
    """[k + 1, SEQUENCE_SUMS]; per-completion values live in slots 0..T-1."""

    def total(values: Tensor) -> Tensor:
        return y.new_zeros(len(y)).index_add_(0, batch.sequence, values)

    def extreme(kind: str, start: int) -> Tensor:
        slots = torch.full_like(batch.sequence, start)
        values = batch.staleness.long().where(valid, start)
        return slots.scatter_reduce_(0, batch.sequence, values, kind)

    size, whole = total(valid.double()), total(y)
    mean = whole / size.clamp(min=1)
    oldest = extreme("amax", 0)
    span = oldest - extreme("amin", num_buckets)
    ratio = bounded_exp(whole)
    columns = [
        torch.ones_like(y), -mean, bounded_exp(-mean), ratio, ratio.square(), span.double(),
    ]  # fmt: skip
    return _by_bucket(torch.stack(columns, dim=1), oldest, size > 0, num_buckets)


def _by_bucket(features: Tensor, bucket: Tensor, valid: Tensor, num_buckets: int) -> Tensor:
    """Rows of `features` added up by bucket; invalid ones go into a row that is cut off."""
    table = features.new_zeros(num_buckets + 1, features.shape[1])
    return table.index_add_(0, bucket.where(valid, num_buckets), features)[:num_buckets]


def _bin(y: Tensor) -> Tensor:
    """Histogram bin of each value; -inf goes to the lowest."""
    place = (y.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) / FINEST).asinh() * _BINS_PER_UNIT
    return place.round().nan_to_num(nan=HALF_BINS).long() + HALF_BINS


NUM_BINS = 2 * HALF_BINS + 1
BIN_VALUES: NDArray[np.float64] = FINEST * np.sinh(
    np.arange(-HALF_BINS, HALF_BINS + 1) / _BINS_PER_UNIT
)
"""The y that each bin stands for."""

Rows = NDArray[np.float64]


def describe(tokens: Rows, sequences: Rows, ratios: Rows, weights: Rows) -> dict[str, float]:
    """The metrics above from added-up tables, per bucket and (without "@d") over all.

    A bucket without tokens is left out, rather than shown as 0.
    """
    found = dict(_of_bucket("", tokens.sum(0), sequences.sum(0), ratios.sum(0)))
    if weights.sum() > 0:
        for name, share in (("p1", 0.01), ("p50", 0.5), ("p99", 0.99)):
            found[f"correction/weight_{name}"] = math.exp(quantile(weights, share))
    for d in range(len(tokens)):
        found |= _of_bucket(f"@{d}", tokens[d], sequences[d], ratios[d])
    whole = dict(zip(TOKEN_SUMS, tokens[0].tolist(), strict=True))
    if whole["pure_tokens"]:
        found["mismatch/k3_numerics"] = whole["pure_k3"] / whole["pure_tokens"]
    stale = dict(_of_bucket("", tokens[1:].sum(0), sequences[1:].sum(0), ratios[1:].sum(0)))
    if "mismatch/k3" in stale and "mismatch/k3@0" in found:
        found["drift/k3"] = stale["mismatch/k3"] - found["mismatch/k3@0"]
    return found


def _of_bucket(
    suffix: str, tokens: Rows, sequences: Rows, ratios: Rows
) -> Iterator[tuple[str, float]]:
    sums = dict(zip(TOKEN_SUMS, tokens.tolist(), strict=True))
    num_tokens = sums["tokens"]
    if num_tokens == 0:
        return
    for name in ("k1", "k3", "abs", "exp_abs"):
        yield f"mismatch/{name}{suffix}", sums[name] / num_tokens
    yield f"mismatch/tokens{suffix}", num_tokens
    yield f"mismatch/chi2{suffix}", sums["ratio_squared"] / num_tokens - 1
    yield f"mismatch/ess{suffix}", _ess(num_tokens, sums["ratio"], sums["ratio_squared"])
    if sums["weight_squared"] > 0:
        share = _ess(num_tokens, sums["weight"], sums["weight_squared"])
        yield f"correction/ess{suffix}", share
    for name, share in (("p1", 0.01), ("p50", 0.5), ("p99", 0.99)):
        yield f"mismatch/ratio_{name}{suffix}", math.exp(quantile(ratios, share))
    sizes = ratios[HALF_BINS:].copy()
    sizes[1:] += ratios[:HALF_BINS][::-1]
    magnitude = np.concatenate([np.zeros(HALF_BINS), sizes])
    yield f"mismatch/abs_p99{suffix}", quantile(magnitude, 0.99)
    yield from _of_sequences(suffix, dict(zip(SEQUENCE_SUMS, sequences.tolist(), strict=True)))


def _of_sequences(suffix: str, sums: dict[str, float]) -> Iterator[tuple[str, float]]:
    count = sums["sequences"]
    if count == 0:
        return
    yield f"mismatch/ppl_gap{suffix}", sums["ppl_gap"] / count
    yield f"mismatch/ppl_ratio{suffix}", sums["ppl_ratio"] / count
    yield f"mismatch/sequence_chi2{suffix}", sums["ratio_squared"] / count - 1
    yield f"mismatch/sequence_ess{suffix}", _ess(count, sums["ratio"], sums["ratio_squared"])
    yield f"staleness/span{suffix}", sums["span"] / count


def _ess(count: float, total: float, total_of_squares: float) -> float:
    return total**2 / (count * total_of_squares)


def quantile(histogram: Rows, share: float) -> float:
    """The y below or at which `share` of the counts lie; the histogram must not be empty."""
    reached = np.cumsum(histogram) >= share * histogram.sum()
    return float(BIN_VALUES[int(reached.argmax())])
