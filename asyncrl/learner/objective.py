"""What an update minimises: proximal policy, then the correction's weights, then the loss.

    value = L - c/N sum_t H_t + K    L: a loss of asyncrl.algo with the weights of a correction
                                     H_t: entropy of pi_theta at token t, c: entropy_bonus
                                     K: KL to the reference policy (algo/kl.py)

The entropy term is a mean over tokens whatever the aggregation, and is not weighted: it is about the
policy, not about who sampled. The proximal policy is one of

| proximal     | log pi_prox                                                | extra forward passes |
|--------------|------------------------------------------------------------|----------------------|
| current      | sg[log pi_theta] of this very pass: the ratio is 1         | 0                    |
| recomputed   | under the weights at the start of the step                 | 1                    |
| interpolated | between log mu and log pi_theta (algo/proximal.py)         | 0                    |
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from asyncrl.algo import LOSSES, Loss, TokenBatch
from asyncrl.algo.corrections import Correction, correct
from asyncrl.algo.kl import KlKind, kl_loss, kl_sums, with_kl_reward
from asyncrl.algo.proximal import interpolated
from asyncrl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss with everything that is bound to it."""

    loss: Loss
    """With its settings bound: (TokenBatch, num_tokens=N) -> (loss, sums)."""

    correct: Callable[[TokenBatch], Correction]
    proximal: Literal["current", "recomputed", "interpolated"] = "current"
    entropy_bonus: float = 0.0
    """c, nats of loss per nat of entropy."""

    kl: KlKind = "none"
    kl_coefficient: float = 0.0
    """Nats of loss per nat of KL."""

    every_token_pulls: bool = False
    """Tokens of advantage 0 have a gradient as well, so a step without any other is no idle one."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> "Objective":
        """As configured."""
        loss, correction = algorithm.loss, algorithm.correction
        return cls(
            # The settings are named like the functions' keyword arguments.
            loss=partial(LOSSES[loss.kind], **loss.model_dump(exclude={"kind"})),
            correct=partial(correct, **correction.model_dump(exclude={"kind"})),
            proximal=algorithm.resolved_proximal,
            entropy_bonus=algorithm.entropy_bonus,
            kl=algorithm.kl.kind,
            kl_coefficient=algorithm.kl.coefficient,
            every_token_pulls=algorithm.every_token_pulls,
        )

    @property
    def rejected_tokens_pull(self) -> bool:
        """Whether tokens of weight 0 have a gradient."""
        return self.entropy_bonus > 0 or self.kl in ("loss_k2", "loss_k3")

    def anchor(self, tokens: TokenBatch) -> TokenBatch:
        """The same under the proximal policy.

        Args:
            tokens: its proximal_logprobs are those of this pass, or the recomputed ones.
        """
        if self.proximal != "interpolated":
            return tokens
        between = interpolated(tokens.logprobs, tokens.behaviour_logprobs, tokens.staleness)
        return tokens._replace(proximal_logprobs=between)

    def __call__(
        self, tokens: TokenBatch, entropy: Tensor, *, num_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Value to minimise, sums by metric name, and the correction's weights [T], of a micro-batch.

        Args:
            tokens: the micro-batch, anchored; its behaviour_weights are not read.
            entropy: [T], with a gradient if there is an entropy bonus.
            num_tokens: N of the update.
        """
        correction = self.correct(tokens)
        tokens = tokens._replace(behaviour_weights=correction.weights)
        if self.kl == "reward_k1":
            tokens = with_kl_reward(tokens, coefficient=self.kl_coefficient)
        value, sums = self.loss(tokens, num_tokens=num_tokens)
        if self.kl != "none":
            sums |= kl_sums(tokens)
        if self.kl in ("loss_k2", "loss_k3"):
            term, of_term = kl_loss(
                tokens, num_tokens=num_tokens, kind=self.kl, coefficient=self.kl_coefficient
            )
            value, sums = value + term, sums | of_term
        total_entropy = entropy.where(tokens.completion_mask, 0.0).sum()
        if self.entropy_bonus > 0:
            value = value - self.entropy_bonus / num_tokens * total_entropy
        sums = correction.sums | sums
        sums |= {"policy/entropy": total_entropy.detach()}
        return value, sums, correction.weights
