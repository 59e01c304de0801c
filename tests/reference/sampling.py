"""Slow scalar restatement of what a sampler with temperature, top-k and top-p draws from."""

import math
from collections.abc import Sequence


def sampled_distribution(
    logits: Sequence[float], temperature: float, top_p: float, top_k: int
) -> dict[int, float]:
    """{token: probability} of the kept tokens; ties of the last kept one are kept."""
    scores = [float(x) / temperature for x in logits]
    kept = list(range(len(scores)))
    if 0 < top_k < len(scores):
        last = sorted(scores, reverse=True)[top_k - 1]
        kept = [i for i in kept if scores[i] >= last]
    weight = {i: math.exp(scores[i] - max(scores)) for i in kept}
    if top_p < 1.0:
        total, reached, last = sum(weight.values()), 0.0, 0.0
        for i in sorted(kept, key=lambda i: -scores[i]):
            reached, last = reached + weight[i], weight[i]
            if reached >= top_p * total:
                break
        weight = {i: w for i, w in weight.items() if w >= last}
    total = sum(weight.values())
    return {i: w / total for i, w in weight.items()}


def drawn_token(distribution: dict[int, float], uniform: float) -> int:
    """Inverse CDF: the first token whose cumulative probability exceeds `uniform`."""
    cumulative = 0.0
    for token in sorted(distribution):
        cumulative += distribution[token]
        if cumulative > uniform:
            return token
    return max(distribution)
