"""The proximal policy without a forward pass of its own, interpolated from versions.

    log pi_prox = log mu + a (sg[log pi_theta] - log mu),     a = d / (d + 1)

d is the token's staleness: with v_prox = V, the version being trained, and V + 1 the one being made, a is
the share (V - v_t) / (V + 1 - v_t) of the way from mu to the current policy. Hence

    log r = (1 - a) z     log w = a z     z = log pi_theta - log mu

so a share 1 / (d + 1) of the whole log-ratio is subject to the clip and the rest to the cap; their
product is the whole ratio. A fresh token (d = 0) is clipped around mu and has weight 1.

Source: arXiv:2512.06547; AReaL sets v_prox one version earlier.
"""

from torch import Tensor


def interpolated(logprobs: Tensor, behaviour_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """[T] log pi_prox, constant; log pi_theta where the behaviour log-prob is not finite.

    Args:
        logprobs: [T] log pi_theta.
        behaviour_logprobs: [T] log mu.
        staleness: [T] d >= 0.
    """
    current = logprobs.detach()
    age = staleness.to(current.dtype)
    proximal = behaviour_logprobs + age / (age + 1) * (current - behaviour_logprobs)
    return proximal.where(behaviour_logprobs.isfinite(), current)
