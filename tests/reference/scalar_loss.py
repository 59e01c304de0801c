"""The clipped loss and its gradient, restated as a slow loop over floats; no code of algo."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    logprob: float
    proximal: float
    behaviour: float
    advantage: float
    trained: bool


def clipped(
    tokens: list[Token],
    *,
    num_tokens: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    tis_cap: float,
) -> tuple[float, list[float]]:
    """The loss, and its derivative in each token's logprob."""
    loss = 0.0
    gradient = []
    for token in tokens:
        value, slope = 0.0, 0.0
        if token.trained:
            value, slope = _token(token, clip_low, clip_high, dual_clip, tis_cap)
        loss += value / num_tokens
        gradient.append(slope / num_tokens)
    return loss, gradient


def _token(
    token: Token, clip_low: float, clip_high: float, dual_clip: float, tis_cap: float
) -> tuple[float, float]:
    if not math.isfinite(token.behaviour):
        return 0.0, 0.0
    weight = min(tis_cap, math.exp(_within_20(token.proximal - token.behaviour)))
    log_ratio = token.logprob - token.proximal
    ratio = math.exp(_within_20(log_ratio))
    ratio_slope = ratio if abs(log_ratio) <= 20 else 0.0
    advantage = token.advantage
    if advantage > 0:
        # Moving further up is not rewarded beyond the upper bound.
        if ratio > 1 + clip_high:
            return -weight * (1 + clip_high) * advantage, 0.0
        return -weight * ratio * advantage, -weight * ratio_slope * advantage
    if advantage < 0:
        if ratio < 1 - clip_low:
            return -weight * (1 - clip_low) * advantage, 0.0
        if ratio > dual_clip:
            return weight * dual_clip * abs(advantage), 0.0
        return -weight * ratio * advantage, -weight * ratio_slope * advantage
    return 0.0, 0.0


def _within_20(value: float) -> float:
    return min(20.0, max(-20.0, value))
