"""The mismatch metrics restated over lists of tokens; no code of algo."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """One token: y = log pi - log mu (None where mu is not finite), and the final weight."""

    y: float | None
    staleness: int
    weight: float
    trained: bool = True


def mean(values):
    return sum(values) / len(values)


def exp20(value):
    return math.exp(min(20.0, max(-20.0, value)))


def ess(weights):
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def empirical_quantile(values, share):
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def counted(completion):
    return [token for token in completion if token.trained and token.y is not None]


def metrics(completions, d=None):
    """All metrics of one staleness bucket, or of everything; {} if nothing is in it."""
    tokens = [t for c in completions for t in counted(c) if d is None or t.staleness == d]
    found = {}
    if tokens:
        ys = [t.y for t in tokens]
        found = {
            "mismatch/tokens": len(ys),
            "mismatch/k1": mean([-y for y in ys]),
            "mismatch/k3": mean([exp20(y) - 1 - min(20, max(-20, y)) for y in ys]),
            "mismatch/abs": mean([abs(y) for y in ys]),
            "mismatch/exp_abs": mean([exp20(abs(y)) for y in ys]),
            "mismatch/chi2": mean([exp20(y) ** 2 for y in ys]) - 1,
            "mismatch/ess": ess([exp20(y) for y in ys]),
            "mismatch/ratio_p1": empirical_quantile([exp20(y) for y in ys], 0.01),
            "mismatch/ratio_p50": empirical_quantile([exp20(y) for y in ys], 0.5),
            "mismatch/ratio_p99": empirical_quantile([exp20(y) for y in ys], 0.99),
            "mismatch/abs_p99": empirical_quantile([min(20, abs(y)) for y in ys], 0.99),
        }
        if any(t.weight for t in tokens):
            found["correction/ess"] = ess([t.weight for t in tokens])
    wholes = [counted(c) for c in completions if counted(c)]
    wholes = [c for c in wholes if d is None or max(t.staleness for t in c) == d]
    if wholes and tokens:
        means = [mean([t.y for t in c]) for c in wholes]
        ratios = [exp20(sum(t.y for t in c)) for c in wholes]
        spans = [max(t.staleness for t in c) - min(t.staleness for t in c) for c in wholes]
        found |= {
            "mismatch/ppl_gap": mean([-m for m in means]),
            "mismatch/ppl_ratio": mean([exp20(-m) for m in means]),
            "mismatch/sequence_chi2": mean([r * r for r in ratios]) - 1,
            "mismatch/sequence_ess": ess(ratios),
            "staleness/span": mean(spans),
        }
    return found
