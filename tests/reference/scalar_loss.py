"""Every loss and its gradient, restated as slow loops over floats; no code of algo, no tensors.

A rule is (token, siblings, settings) -> (l_t, d l_t / d log pi_t), where siblings are the tokens of the
same completion that count. Only GSPO's direct form couples tokens; it has a loop of its own.
"""

import math
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    logprob: float
    proximal: float
    behaviour: float
    advantage: float
    trained: bool
    sequence: int = 0

    @property
    def counts(self) -> bool:
        return self.trained and math.isfinite(self.behaviour)


def evaluate(
    kind: str,
    tokens: list[Token],
    *,
    settings: dict,
    aggregation: str = "token_mean",
    constant: int = 7,
    prompts: list[int] | None = None,
    tis_cap: float | None = None,
    weights: list[float] | None = None,
) -> tuple[float, list[float], float]:
    """Loss of one whole update, its derivative in each token's logprob, and the sum of |terms|.

    Behaviour weights are min(C, prox / mu) with C = `tis_cap`, or `weights` token by token.
    """
    shares = _shares(tokens, aggregation, constant, prompts)
    loss, magnitude, gradient = 0.0, 0.0, [0.0] * len(tokens)
    for t, token in enumerate(tokens):
        if not token.counts:
            continue
        factor = shares[t] * (_tis(token, tis_cap) if weights is None else weights[t])
        siblings = [other for other in tokens if other.counts and other.sequence == token.sequence]
        if kind == "gspo" and not settings["token_level"]:
            value, slope = _gspo_sequence(token, siblings, settings)
            for u, other in enumerate(tokens):
                if other.counts and other.sequence == token.sequence:
                    gradient[u] += factor * slope / len(siblings)
        else:
            value, slope = RULES[kind](token, siblings, settings)
            gradient[t] += factor * slope
        loss += factor * value
        magnitude += abs(factor * value)
    return loss, gradient, magnitude


def _shares(tokens, aggregation, constant, prompts):
    """What each trained token's loss is multiplied with, from the definitions of the four means."""
    lengths = defaultdict(int)
    for token in tokens:
        if token.trained:
            lengths[token.sequence] += 1
    num_tokens, num_sequences = sum(lengths.values()), len(lengths)
    by_prompt = defaultdict(int)
    if aggregation == "prompt_mean":
        for sequence, length in lengths.items():
            by_prompt[prompts[sequence]] += length
    shares = []
    for token in tokens:
        if not token.trained:
            shares.append(math.nan)
        elif aggregation == "token_mean":
            shares.append(1 / num_tokens)
        elif aggregation == "sequence_mean":
            shares.append(1 / num_sequences / lengths[token.sequence])
        elif aggregation == "constant_length":
            shares.append(1 / num_sequences / constant)
        else:
            shares.append(1 / len(by_prompt) / by_prompt[prompts[token.sequence]])
    return shares


def _tis(token, cap):
    return 1.0 if cap is None else min(cap, _exp(token.proximal - token.behaviour))


def _exp(x):
    return math.exp(min(20.0, max(-20.0, x)))


def _slope_of_exp(x):
    return math.exp(x) if abs(x) <= 20 else 0.0


def _ppo(log_ratio, advantage, low, high, dual=math.inf):
    """Loss, and its derivative in the log-ratio."""
    ratio, slope = _exp(log_ratio), _slope_of_exp(log_ratio)
    if advantage > 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return -(1 - low) * advantage, 0.0
    if advantage < 0 and ratio > dual:
        return dual * -advantage, 0.0
    return -ratio * advantage, -slope * advantage


def _clipped(token, _, s):
    return _ppo(
        token.logprob - token.proximal,
        token.advantage, s["clip_low"], s["clip_high"], s["dual_clip"],
    )  # fmt: skip


def _behaviour_clipped(token, _, s):
    return _ppo(
        token.logprob - token.behaviour,
        token.advantage, s["clip_low"], s["clip_high"], s["dual_clip"],
    )  # fmt: skip


def _weighted_log(token, weight):
    """-sg(weight) A log pi."""
    return -weight * token.advantage * token.logprob, -weight * token.advantage


def _reinforce(token, _, s):
    return _weighted_log(token, 1.0)


def _anchor(token, s):
    return token.behaviour if s["anchor"] == "behaviour" else token.proximal


def _cispo(token, _, s):
    ratio = _exp(token.logprob - _anchor(token, s))
    return _weighted_log(token, min(s["cap"], max(s["floor"], ratio)))


def _mean_log_ratio(siblings):
    return sum(other.logprob - other.proximal for other in siblings) / len(siblings)


def _gspo_sequence(token, siblings, s):
    return _ppo(_mean_log_ratio(siblings), token.advantage, s["clip_low"], s["clip_high"])


def _gspo_token(token, siblings, s):
    mean = _mean_log_ratio(siblings)
    value, _ = _ppo(mean, token.advantage, s["clip_low"], s["clip_high"])
    # The clamp acts on a constant factor: inside the clip the slope is the ratio, clamped or not.
    clipped = value != -_exp(mean) * token.advantage
    return value, 0.0 if clipped else -_exp(mean) * token.advantage


def _sapo(token, _, s):
    log_ratio = token.logprob - token.proximal
    tau = s["tau_positive"] if token.advantage > 0 else s["tau_negative"]
    x = tau * (_exp(log_ratio) - 1)
    small = math.exp(-abs(x))
    gate = 1 / (1 + small) if x >= 0 else small / (1 + small)
    slope = small / (1 + small) ** 2
    return (
        -4 / tau * gate * token.advantage,
        -4 * slope * _slope_of_exp(log_ratio) * token.advantage,
    )


def _dppo(token, _, s):
    anchor = _anchor(token, s)
    p, q = math.exp(token.logprob), math.exp(anchor)
    if s["divergence"] == "tv":
        moved = abs(p - q)
    else:
        rest_p = max(1e-30, -math.expm1(token.logprob))
        rest_q = max(1e-30, -math.expm1(anchor))
        moved = q * (anchor - token.logprob) + rest_q * math.log(rest_q / rest_p)
    up = token.advantage > 0 and token.logprob > anchor and moved > s["max_rise"]
    down = token.advantage < 0 and token.logprob < anchor and moved > s["max_fall"]
    if up or down:
        return 0.0, 0.0
    return _weighted_log(token, min(s["cap"], _exp(token.logprob - anchor)))


def _topr(token, siblings, s):
    if token.advantage >= 0:
        return _weighted_log(token, 1.0)
    total = sum(other.logprob - other.behaviour for other in siblings)
    return _weighted_log(token, min(s["cap"], _exp(total)))


def _m2po(token, siblings, s):
    # The largest leave until the rest fits; among equals the last one leaves first.
    kept = list(siblings)
    while len(kept) > 1 and math.fsum(_square(o) for o in kept) / len(kept) > s["budget"]:
        largest = max(_square(o) for o in kept)
        last = max(i for i, o in enumerate(kept) if _square(o) == largest)
        del kept[last]
    if not any(o is token for o in kept):
        return 0.0, 0.0
    z = token.logprob - token.behaviour
    return -_exp(z) * token.advantage, -_slope_of_exp(z) * token.advantage


def _square(token):
    z = token.logprob - token.behaviour
    return z * z


def _squared_log_ratio(token, _, s):
    z = token.logprob - token.behaviour
    value, slope = _weighted_log(token, 1.0)
    return value + s["beta"] / 2 * z * z, slope + s["beta"] * z


RULES = {
    "clipped": _clipped,
    "behaviour_clipped": _behaviour_clipped,
    "reinforce": _reinforce,
    "cispo": _cispo,
    "gspo": _gspo_token,
    "sapo": _sapo,
    "dppo": _dppo,
    "topr": _topr,
    "m2po": _m2po,
    "squared_log_ratio": _squared_log_ratio,
}
