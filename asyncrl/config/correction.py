"""The section `algorithm.correction`: a named correction, its keys, and which of them cancel out.

A kind is a set of settings; a key given beside it replaces that one. Which losses take a weight at all
is decided in algorithm.py.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from asyncrl.config.section import Section

CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "token_tis": {"weight": "token", "cap": 2.0},
    "token_tis_two_sided": {"weight": "token", "low": 0.5, "cap": 5.0},
    "sequence_tis": {"weight": "sequence", "cap": 2.0},
    "icepop": {"weight": "token", "mask_low": 0.5, "mask_high": 5.0},
    "geometric": {
        "weight": "token", "cap": 2.0,
        "reject": "geometric", "reject_low": 0.99, "reject_high": 1.01,
    },
    "k3": {"weight": "token", "cap": 2.0, "reject": "k3", "reject_high": 0.01},
    "opsm": {"weight": "token", "cap": 2.0, "opsm_delta": 0.1},
    "veto": {"weight": "token", "cap": 2.0, "veto": True},
}  # fmt: skip
"""Settings of `algorithm.correction` by its `kind`; a key given beside the kind replaces its value."""


class CorrectionConfig(Section):
    """Weights for having been sampled by another policy (formulas in algo/corrections.py)."""

    kind: Literal[
        "none", "token_tis", "token_tis_two_sided", "sequence_tis", "icepop", "geometric", "k3",
        "opsm", "veto",
    ] = "token_tis"  # fmt: skip
    """Sets all keys below to a named correction; each may be given beside it, and then replaces its own.
    none: weight 1, for losses that hold mu themselves
    token_tis: token weights, cut down to 2; token_tis_two_sided: kept within 0.5..5
    sequence_tis: one weight a completion, cut down to 2; for short completions
    icepop: token weights; tokens outside 0.5..5 train nothing
    geometric, k3: token_tis, and completions that are too far off on average train nothing
    opsm: token_tis, and bad completions that became much less likely train nothing
    veto: token_tis, and completions with a single absurd ratio train nothing"""

    weight: Literal["none", "token", "sequence"] = "none"
    """Level of the importance weight pi_prox / mu."""

    low: float = Field(0.0, ge=0.0)
    """Weights below are raised to it; 0 leaves them."""

    cap: float = Field(0.0, ge=0.0)
    """C: weights above are cut down to it; 0 leaves them."""

    mask_low: float = Field(0.0, ge=0.0)
    """Tokens whose ratio is lower train nothing."""

    mask_high: float = Field(0.0, ge=0.0)
    """Tokens whose ratio is higher train nothing; 0 sets no bound."""

    reject: Literal["none", "product", "geometric", "k3"] = "none"
    """Statistic of a completion's ratios by which the whole completion is dropped."""

    reject_low: float = Field(0.0, ge=0.0)
    reject_high: float = Field(0.0, ge=0.0)
    veto: bool = False
    """Drop a completion with any ratio outside [1e-4, 100]."""

    opsm_delta: float = Field(0.0, ge=0.0)
    """Drop a completion with a negative advantage that became less likely by more than this many nats
    a token; 0 is off. Published values lie three orders of magnitude apart: tune it."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_kind(cls, given: Any) -> Any:  # noqa: ANN401
        if not isinstance(given, dict):
            return given
        named = dict(CORRECTIONS.get(given.get("kind", "token_tis"), {}))
        if given.get("weight") == "none":  # the named bounds go with the weight that they bounded
            named.pop("low", None), named.pop("cap", None)
        return named | given

    @property
    def implied(self) -> frozenset[str]:
        """Keys as `kind` alone sets them. Printed, they would outvote a `kind` changed later."""
        named = CorrectionConfig(kind=self.kind)
        keys = type(self).model_fields.keys() - {"kind"}
        return frozenset(key for key in keys if getattr(self, key) == getattr(named, key))

    def refusals(self) -> Iterator[str]:
        """Why these settings may not stand together; nothing if they may."""
        shown = self.model_dump(exclude_defaults=True, exclude={"kind"})
        for is_wrong, reason in _CANCELLING:
            if is_wrong(self):
                yield f"algorithm.correction.kind={self.kind!r} with {shown}: {reason}"


_CANCELLING: list[tuple[Callable[[CorrectionConfig], bool], str]] = [
    (
        lambda c: c.weight == "none" and (c.low > 0 or c.cap > 0),
        "low and cap bound a weight, and weight=none has none",
    ),
    (
        lambda c: 0 < c.cap <= c.low,
        "low must lie below cap, else every weight is the same",
    ),
    (
        lambda c: c.weight == "token" and 0 < c.low <= c.mask_low,
        "what low would raise, mask_low drops; give one of them",
    ),
    (
        lambda c: 0 < c.mask_high <= c.mask_low,
        "mask_low must lie below mask_high, else every token is dropped",
    ),
    (
        lambda c: c.reject == "none" and (c.reject_low > 0 or c.reject_high > 0),
        "reject_low and reject_high bound a statistic, and reject=none names none",
    ),
    (
        lambda c: c.reject != "none" and c.reject_low == c.reject_high == 0,
        "reject names a statistic without bounds; give reject_low or reject_high",
    ),
    (
        lambda c: c.reject == "k3" and c.reject_low > 0,
        "k3 is 0 where the policies agree: reject_low would drop the completions that are right",
    ),
    (
        lambda c: 0 < c.reject_high <= c.reject_low,
        "reject_low must lie below reject_high, else every completion is dropped",
    ),
    (
        lambda c: (
            c.reject in ("product", "geometric") and (c.reject_low > 1 or 0 < c.reject_high < 1)
        ),
        "a ratio of 1, which is what agreement gives, must lie between reject_low and reject_high",
    ),
    (
        lambda c: c.mask_low > 1 or 0 < c.mask_high < 1,
        "a ratio of 1, which is what agreement gives, must lie between mask_low and mask_high",
    ),
]
"""Settings that count the same thing twice, or of which one undoes the other, and why. "Two weights"
cannot be said: weight is one key. A sequence weight beside a geometric or product bound is fine: the
one scales what the other kept. A cap above mask_high is fine: the mask then decides alone."""
