"""The off-policy corrections restated as slow loops over floats; no code of algo."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampled:
    """One token as the correction sees it; the learner's log-prob minus mu is its log-ratio."""

    proximal: float
    behaviour: float
    trained: bool
    advantage: float = 1.0


@dataclass(frozen=True)
class Rules:
    """The settings under their own names; None is "not asked for"."""

    weight: str = "none"
    low: float | None = None
    cap: float | None = None
    mask_low: float | None = None
    mask_high: float | None = None
    reject: str = "none"
    reject_low: float | None = None
    reject_high: float | None = None
    veto: bool = False
    opsm_delta: float | None = None


def known(token: Sampled) -> bool:
    return token.trained and math.isfinite(token.behaviour)


def log_ratios(completion: list[Sampled]) -> list[float]:
    return [token.proximal - token.behaviour for token in completion if known(token)]


def exp20(value: float) -> float:
    return math.exp(min(20.0, max(-20.0, value)))


def verdict(completion: list[Sampled], rules: Rules) -> str:
    """Why a whole completion is dropped; "" if it is kept. Several reasons: joined by "+"."""
    ys = log_ratios(completion)
    if not ys:
        return ""
    reasons = []
    if rules.reject != "none":
        statistic = {
            "product": exp20(sum(ys)),
            "geometric": exp20(sum(ys) / len(ys)),
            "k3": sum(math.expm1(min(20, max(-20, y))) - min(20, max(-20, y)) for y in ys)
            / len(ys),
        }[rules.reject]
        if rules.reject_low is not None and statistic < rules.reject_low:
            reasons.append("rejected")
        if rules.reject_high is not None and statistic > rules.reject_high:
            reasons.append("rejected")
    if rules.veto and any(exp20(y) < 1e-4 or exp20(y) > 100 for y in ys):
        reasons.append("vetoed")
    if rules.opsm_delta is not None:
        advantage = sum(token.advantage for token in completion if known(token))
        if advantage < 0 and -sum(ys) / len(ys) > rules.opsm_delta:
            reasons.append("opsm")
    return "+".join(reasons)


def weights(completion: list[Sampled], rules: Rules) -> list[float]:
    """The weight of every token of one completion."""
    dropped = verdict(completion, rules)
    whole = exp20(sum(log_ratios(completion)))
    found = []
    for token in completion:
        if not known(token) or dropped:
            found.append(0.0)
            continue
        ratio = exp20(token.proximal - token.behaviour)
        if rules.mask_low is not None and ratio < rules.mask_low:
            found.append(0.0)
            continue
        if rules.mask_high is not None and ratio > rules.mask_high:
            found.append(0.0)
            continue
        weight = {"none": 1.0, "token": ratio, "sequence": whole}[rules.weight]
        if rules.cap is not None and weight > rules.cap:
            weight = rules.cap
        elif rules.low is not None and weight < rules.low:
            weight = rules.low
        found.append(weight)
    return found
