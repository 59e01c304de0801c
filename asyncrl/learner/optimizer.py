"""AdamW (arXiv:1711.05101) with a constant rate after a linear warm-up.

The rate is a function of the version alone, so that a resumed run continues the same schedule.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.learner.model import Policy


class Optimizer:
    """AdamW over a policy's parameters; matrices decay, vectors (norms, biases) do not."""

    def __init__(
        self,
        policy: Policy,
        *,
        learning_rate: float,
        weight_decay: float,
        beta1: float,
        beta2: float,
        max_grad_norm: float,
        num_warmup_steps: int,
    ) -> None:
        """Call after the policy was sharded and moved to its device."""
        self.parameters = dict(policy.named_weights())
        """By name; tied ones once."""

        self._learning_rate = learning_rate
        self._num_warmup_steps = num_warmup_steps
        self._max_grad_norm = max_grad_norm
        parameters = list(self.parameters.values())
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=(beta1, beta2),
            fused=True,
        )

    def learning_rate(self, version: int) -> float:
        """Rate of the step that trains `version`; a warm-up of n steps begins with 1/n of it."""
        if self._num_warmup_steps == 0:
            return self._learning_rate
        return self._learning_rate * min(1.0, (version + 1) / self._num_warmup_steps)

    def grad_norm(self) -> Tensor:
        """Euclidean norm of the whole gradient, over all ranks; a scalar on the device."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, version: int, grad_norm: Tensor) -> None:
        """Scale the gradient down to max_grad_norm if it is longer, and update."""
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate(version)
        nn.utils.clip_grads_with_norm_(
            self.parameters.values(), self._max_grad_norm, grad_norm, foreach=None
        )
        self.adam.step()

    def clear(self) -> None:
        """Drop the gradient."""
        self.adam.zero_grad(set_to_none=True)
