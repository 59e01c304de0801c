"""The section `algorithm`: from rewards to a gradient, and which settings may not stand together.

A loss is chosen by `algorithm.loss.kind`; the fields of its section are the keyword arguments of its
function in asyncrl/algo. Every importance ratio may enter once. What holds it, by the policy that the
loss compares pi_theta with (its anchor):

| anchor     | losses                                      | ratio in the loss | correction's weight |
|------------|---------------------------------------------|-------------------|---------------------|
| proximal   | clipped, gspo, sapo; cispo                  | pi_theta/pi_prox  | pi_prox/mu          |
| behaviour  | behaviour_clipped, topr, m2po, squared_log_ratio; dppo | pi_theta/mu | refused        |
| none       | reinforce                                   | none              | pi_prox/mu          |

cispo and dppo are of the kind that their `anchor` says. `AlgorithmConfig.refusals` lists what is
refused, and why.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from asyncrl.config.correction import CorrectionConfig
from asyncrl.config.section import Section

Anchor = Literal["proximal", "behaviour", "none"]


class ClippedLoss(Section):
    """Decoupled PPO: clipped around the proximal policy."""

    kind: Literal["clipped"] = "clipped"
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    clip_high: float = Field(0.28, gt=0.0)
    dual_clip: float = Field(3.0, gt=1.0)
    """For negative advantages the ratio counts no more than this."""


class BehaviourClippedLoss(Section):
    """PPO clipped around the behaviour policy, without a correction."""

    kind: Literal["behaviour_clipped"] = "behaviour_clipped"
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    clip_high: float = Field(0.2, gt=0.0)
    dual_clip: float = Field(3.0, gt=1.0)
    """For negative advantages the ratio counts no more than this."""


class ReinforceLoss(Section):
    """-A log pi, weighted by the correction alone; AIPO with a token cap."""

    kind: Literal["reinforce"] = "reinforce"


class CispoLoss(Section):
    """A clipped but constant ratio: every token keeps a gradient."""

    kind: Literal["cispo"] = "cispo"
    floor: float = Field(0.0, ge=0.0, le=1.0)
    """Least value of the ratio."""

    cap: float = Field(5.0, ge=1.0)
    """Greatest value of the ratio."""

    anchor: Literal["proximal", "behaviour"] = "proximal"


class GspoLoss(Section):
    """One ratio for a whole completion; meant for aggregation="sequence_mean"."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0.0, lt=1.0)
    clip_high: float = Field(4e-4, gt=0.0)
    token_level: bool = False
    """Each token is pulled by its own advantage and weight (GSPO-token), not by their mean."""


class SapoLoss(Section):
    """A sigmoid gate in place of the clip."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0.0)
    tau_negative: float = Field(1.05, gt=0.0)
    """Larger: a token's pull decays faster as its ratio leaves 1."""


def _dppo_threshold(values: dict[str, Any]) -> float:
    return 0.05 if values.get("divergence") == "kl" else 0.2


class DppoLoss(Section):
    """Tokens silenced by how much probability they moved; no correction unless anchor="proximal"."""

    kind: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    max_fall: float = Field(default_factory=_dppo_threshold, gt=0.0)
    """Divergence at which tokens of negative advantage stop; 0.2 for tv, 0.05 nats for kl."""

    max_rise: float = Field(default_factory=_dppo_threshold, gt=0.0)
    """The same for positive advantages."""

    cap: float = Field(20.0, ge=1.0)
    """Greatest value of the ratio."""

    anchor: Literal["proximal", "behaviour"] = "behaviour"


class ToprLoss(Section):
    """Imitate the good completions; push the bad ones by their capped ratio; no correction."""

    kind: Literal["topr"] = "topr"
    cap: float = Field(1.0, gt=0.0)


class M2poLoss(Section):
    """The ratio to mu, its largest log-ratios masked by their second moment; no correction."""

    kind: Literal["m2po"] = "m2po"
    budget: float = Field(0.04, gt=0.0)
    """Mean squared log-ratio allowed in a completion."""


class SquaredLogRatioLoss(Section):
    """-A log pi and a quadratic pull to mu; no ratio, no correction."""

    kind: Literal["squared_log_ratio"] = "squared_log_ratio"
    beta: float = Field(0.1, gt=0.0)
    """Strength of the pull."""


_Losses = (
    ClippedLoss
    | BehaviourClippedLoss
    | ReinforceLoss
    | CispoLoss
    | GspoLoss
    | SapoLoss
    | DppoLoss
    | ToprLoss
    | M2poLoss
    | SquaredLogRatioLoss
)
LossConfig = Annotated[_Losses, Field(discriminator="kind")]
LOSS_KINDS: tuple[str, ...] = tuple(
    variant.model_fields["kind"].default for variant in get_args(_Losses)
)

_ANCHORS: dict[str, Anchor] = {
    "clipped": "proximal",
    "gspo": "proximal",
    "sapo": "proximal",
    "reinforce": "none",
    "behaviour_clipped": "behaviour",
    "topr": "behaviour",
    "m2po": "behaviour",
    "squared_log_ratio": "behaviour",
}
"""The policy that a loss compares pi_theta with; cispo and dppo say it themselves."""


class KlConfig(Section):
    """KL to the initial model, which is then loaded a second time (formulas in algo/kl.py)."""

    kind: Literal["none", "reward_k1", "loss_k2", "loss_k3"] = "none"
    """Where the term is: in the advantages, or in the loss; all three have the gradient of the KL."""

    coefficient: float = Field(1e-3, gt=0.0)
    """Nats of loss per nat of KL."""


class AlgorithmConfig(Section):
    """Rewards to gradient."""

    advantage: Literal[
        "mean_std", "mean", "leave_one_out", "batch_std", "length_weighted", "max_rl", "raw"
    ] = "mean_std"
    """What a score is compared with (formulas in algo/advantages.py)."""

    overlong_buffer_tokens: int = Field(0, ge=0)
    """Scores fall by up to 1 over the last so many tokens before engine.max_completion_tokens, so that
    the length limit is no cliff (DAPO); 0 is off."""

    loss: LossConfig = ClippedLoss()
    correction: CorrectionConfig = CorrectionConfig()
    aggregation: Literal["token_mean", "sequence_mean", "constant_length", "prompt_mean"] = (
        "token_mean"
    )
    """How tokens are averaged; constant_length divides by engine.max_completion_tokens."""

    num_minibatches: int = Field(1, ge=1)
    """Optimizer updates of a step: its groups are cut into as many parts, each with a token count of its
    own. The version rises by one all the same. More reuse a batch harder, and then the clip acts."""

    proximal: Literal["auto", "current", "recomputed", "interpolated"] = "auto"
    """pi_prox: current is the forward pass of the update itself; recomputed is one more pass at the start
    of the step; interpolated lies between mu and the current policy, by staleness. auto: recomputed if a
    step has several updates and the loss is anchored on pi_prox, else current."""

    mask_truncated: bool = False
    """Completions that hit the length limit train no token; their score stays in the baseline."""

    kl: KlConfig = KlConfig()
    entropy_bonus: float = Field(0.0, ge=0.0)
    """Weight of the mean entropy of the tokens, which is then raised along with the reward."""

    @property
    def anchor(self) -> Anchor:
        """The policy that the loss compares pi_theta with."""
        loss = self.loss
        return loss.anchor if isinstance(loss, CispoLoss | DppoLoss) else _ANCHORS[loss.kind]

    @property
    def resolved_proximal(self) -> Literal["current", "recomputed", "interpolated"]:
        """`proximal` with auto decided."""
        if self.proximal != "auto":
            return self.proximal
        several = self.num_minibatches > 1 and self.anchor == "proximal"
        return "recomputed" if several else "current"

    @property
    def every_token_pulls(self) -> bool:
        """Whether tokens of advantage 0 have a gradient too, so that none may be left out."""
        pulled = self.loss.kind == "squared_log_ratio" or self.kl.kind != "none"
        return pulled or self.entropy_bonus > 0

    def refusals(self) -> Iterator[str]:
        """Why these settings may not stand together; nothing if they may."""
        yield from self.correction.refusals()
        loss = f"algorithm.loss.kind={self.loss.kind!r} (anchored on {self.anchor})"
        weight = f"algorithm.correction.weight={self.correction.weight!r}"
        proximal = f"algorithm.proximal={self.proximal!r}"
        if self.anchor == "behaviour" and self.correction.weight != "none":
            yield (
                f"{loss} compares with mu itself, and {weight} would count pi_prox/mu a second time; "
                'set algorithm.correction.kind="none"'
            )
        if self.proximal == "interpolated" and self.anchor != "proximal":
            yield (
                f"{proximal} leaves a part of pi_theta/mu to a ratio pi_theta/pi_prox, which {loss} "
                'does not have; set algorithm.proximal="auto"'
            )
        if self.proximal == "interpolated" and self.correction.weight == "none":
            yield (
                f"{proximal} leaves a part of pi_theta/mu to the correction, and {weight}; "
                'set algorithm.correction.kind="token_tis"'
            )
        if self.proximal == "current" and self.num_minibatches > 1 and (self.anchor == "proximal"):
            yield (
                f"{proximal} makes the ratio of {loss} 1 in each of algorithm.num_minibatches="
                f"{self.num_minibatches} updates, so that nothing bounds them; "
                'set algorithm.proximal="recomputed"'
            )

    @field_validator("loss", mode="before")
    @classmethod
    def _default_kind(cls, given: object) -> object:
        return {"kind": "clipped"} | given if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _refuse(self) -> "AlgorithmConfig":
        reasons = list(self.refusals())
        if reasons:
            raise ValueError("; ".join(reasons))
        return self
