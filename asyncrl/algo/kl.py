"""KL(pi_theta || pi_ref): keeping the policy near a frozen reference.

    u_t = log pi_theta - log pi_ref        R_t = sg[min(10, pi_theta / mu)]        b = coefficient

| kind      | what it does                                | gradient, in expectation over mu           |
|-----------|---------------------------------------------|--------------------------------------------|
| reward_k1 | A_t - b sg[u_t] in place of A_t             | b grad KL, through the policy loss, with   |
|           |                                             | its weights and clips                      |
| loss_k2   | L + b/N sum_t scale_t R_t u_t^2 / 2         | b grad KL                                  |
| loss_k3   | the same gradient, but its value is         | b grad KL                                  |
|           | R_t (e^-u - 1 + u), unbiased for KL         |                                            |

What is differentiated is what decides: k1 = u as a loss has gradient 0 in expectation, and k3 that of
KL(pi_ref || pi_theta). k2's is u grad log pi_theta, whose expectation under pi_theta is grad KL; R
carries it over to tokens that mu sampled. Where R exceeds 10 it is cut (a bias, against a variance
without bound); where mu is not known it is 0.

Per token: each state's KL is lowered with the states as they are. That an earlier token leads to
states of larger KL is not charged to it (no sum over the rest of the completion, whose noise grows
with the length). The correction's masks and weights act on reward_k1 alone, as on any advantage; a
rejected token is still pulled by loss_k2 and loss_k3. With a KL term no token is left out of the step
for having advantage 0, and all count in N.

Sources: estimators, joschu.net/blog/kl-approx.html; which gradient they have, and what a term per token
leaves out, arXiv:2506.09477; k1 in the reward equals k2 in the loss, and the weight for samples of
another policy, arXiv:2510.01555.
"""

from typing import Literal

import torch
from torch import Tensor

from asyncrl.algo.guards import MAX_LOG_RATIO, bounded_exp
from asyncrl.algo.tokens import TokenBatch

KlKind = Literal["none", "reward_k1", "loss_k2", "loss_k3"]

MAX_RATIO = 10.0
"""pi_theta / mu counts no more than this."""


def with_kl_reward(batch: TokenBatch, *, coefficient: float) -> TokenBatch:
    """The same batch with reward_k1 in its advantages; `coefficient` is b > 0, per nat."""
    return batch._replace(advantages=batch.advantages - coefficient * _log_ratio(batch).detach())


def kl_loss(
    batch: TokenBatch, *, num_tokens: int, kind: Literal["loss_k2", "loss_k3"], coefficient: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The term to add to a micro-batch's loss; the contract of a loss is in tokens.py.

    Args:
        batch: the micro-batch, with reference_logprobs; its behaviour_weights are not read.
        num_tokens: N >= 1 of the update.
        kind: which value the term has; the gradient is the same.
        coefficient: b > 0, per nat.
    """
    log_ratio, weights = _log_ratio(batch), _weights(batch)
    term = log_ratio.square() / 2
    if kind == "loss_k3":
        term = term - term.detach() + _k3(log_ratio).detach()
    total = (batch.scale.where(weights > 0, 0.0) * weights * term).sum()
    return coefficient / num_tokens * total, {"kl/loss": coefficient * total.detach()}


@torch.no_grad()
def kl_sums(batch: TokenBatch) -> dict[str, Tensor]:
    """Two estimates of KL(pi_theta || pi_ref), as sums over tokens weighted with R."""
    log_ratio, weights = _log_ratio(batch), _weights(batch)
    return {"kl/k1": (weights * log_ratio).sum(), "kl/k3": (weights * _k3(log_ratio)).sum()}


def _counts(batch: TokenBatch) -> Tensor:
    return batch.completion_mask & batch.behaviour_logprobs.isfinite()


def _log_ratio(batch: TokenBatch) -> Tensor:
    """[T] u, differentiable; 0 where a token does not count."""
    if batch.reference_logprobs is None:
        raise ValueError("a KL term needs reference_logprobs, got None")
    counts = _counts(batch)
    # Both sides are cleaned before the difference: NaN - x has a NaN gradient even if masked.
    return batch.logprobs.where(counts, 0.0) - batch.reference_logprobs.where(counts, 0.0)


def _weights(batch: TokenBatch) -> Tensor:
    """[T] R, constant."""
    log_ratio = batch.logprobs.detach() - batch.behaviour_logprobs
    return bounded_exp(log_ratio).clamp(max=MAX_RATIO).where(_counts(batch), 0.0)


def _k3(log_ratio: Tensor) -> Tensor:
    """e^-u - 1 + u, by expm1 so that it does not cancel near 0."""
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-clamped).expm1() + clamped
