"""The KL terms and their gradients restated over floats; no code of algo."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Referenced:
    """One token under three policies."""

    logprob: float
    behaviour: float
    reference: float
    trained: bool = True
    scale: float = 1.0


def within_20(value):
    return min(20.0, max(-20.0, value))


def weight(token):
    """min(10, pi / mu); 0 where mu is no number."""
    if not token.trained or not math.isfinite(token.behaviour):
        return 0.0
    return min(10.0, math.exp(within_20(token.logprob - token.behaviour)))


def k3(u):
    u = within_20(u)
    return math.expm1(-u) + u


def kl_term(tokens, *, num_tokens, kind, coefficient):
    """Value of the term, and its derivative in each token's logprob."""
    value, slopes = 0.0, []
    for token in tokens:
        w = weight(token)
        if w == 0.0:
            slopes.append(0.0)
            continue
        u = token.logprob - token.reference
        share = coefficient / num_tokens * token.scale * w
        value += share * (u * u / 2 if kind == "loss_k2" else k3(u))
        slopes.append(share * u)  # the same for both
    return value, slopes
