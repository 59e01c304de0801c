"""How far the learner's policy is from the one that sampled, by staleness.

    y = log pi_prox - log mu, per token; over the tokens of staleness d:

    mismatch/k1@d        mean of -y               estimates KL(mu || pi), signed
    mismatch/k3@d        mean of e^y - 1 - y      the same, never negative, low variance
    mismatch/abs@d       mean of |y|
    mismatch/exp_abs@d   mean of e^|y|            multiplicative error of the probabilities
    mismatch/ess@d       (sum e^y)^2 / (n sum e^2y)   effective sample size, share of tokens; no cap
    mismatch/max         largest |y| over all

At d = 0 both policies have the same weights, so y is numerics alone; what later buckets add is
policy. Micro-batches emit sums (`mismatch_sums`); they are divided once, after all ranks were added
up (`mismatch_means`). Tokens whose behaviour log-prob is not finite are left out (the loss counts
them).

Sources: k1 and k3, joschu.net/blog/kl-approx.html; ESS, Kong 1992.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.algo.guards import MAX_LOG_RATIO
from asyncrl.algo.tokens import TokenBatch

SUMS = ("tokens", "k1", "k3", "abs", "exp_abs", "weight", "weight_squared")
MEANS = ("k1", "k3", "abs", "exp_abs")


@torch.no_grad()
def mismatch_sums(batch: TokenBatch, *, max_staleness: int) -> tuple[dict[str, Tensor], Tensor]:
    """Sums per staleness bucket 0..max_staleness, and the largest |y| (0 without tokens).

    Keys are "mismatch/<name>@<staleness>" for the names in SUMS, where weight = e^y before any cap.
    Exponents are clamped to +-20.
    """
    valid = batch.completion_mask & batch.behaviour_logprobs.isfinite()
    log_ratio = (batch.proximal_logprobs - batch.behaviour_logprobs).where(valid, 0.0)
    magnitude = log_ratio.abs()
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = clamped.exp()
    features = torch.stack(
        [
            torch.ones_like(log_ratio),
            -log_ratio,
            # expm1: e^y - 1 cancels near 0, where healthy runs are.
            clamped.expm1() - clamped,
            magnitude,
            clamped.abs().exp(),
            weight,
            weight.square(),
        ],
        dim=1,
    ).where(valid.unsqueeze(1), 0.0)
    bucket = batch.staleness.where(valid, 0).long()
    table = features.new_zeros(max_staleness + 1, len(SUMS)).index_add_(0, bucket, features)
    sums = {
        f"mismatch/{name}@{staleness}": table[staleness, column]
        for staleness in range(max_staleness + 1)
        for column, name in enumerate(SUMS)
    }
    largest = magnitude.max() if magnitude.numel() else magnitude.new_zeros(())
    return sums, largest


def mismatch_means(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics above from reduced sums, per bucket and (without "@d") over all tokens.

    A bucket without tokens is left out, rather than shown as 0.
    """
    buckets = sorted({name.partition("@")[2] for name in sums}, key=int)
    total = {name: sum(sums[f"mismatch/{name}@{bucket}"] for bucket in buckets) for name in SUMS}
    means = _divide(total, "")
    for bucket in buckets:
        means |= _divide({name: sums[f"mismatch/{name}@{bucket}"] for name in SUMS}, f"@{bucket}")
    return means


def _divide(sums: Mapping[str, float], suffix: str) -> dict[str, float]:
    num_tokens = sums["tokens"]
    if num_tokens == 0:
        return {}
    means = {f"mismatch/{name}{suffix}": sums[name] / num_tokens for name in MEANS}
    means[f"mismatch/tokens{suffix}"] = num_tokens
    means[f"mismatch/ess{suffix}"] = sums["weight"] ** 2 / (num_tokens * sums["weight_squared"])
    return means
