"""The reference policy: the initial model, frozen, for a KL term only.

It is the model of model.path, also when a run resumes from a checkpoint: the reference does not move.
It costs one forward pass without gradients a micro-batch. With an adapter it is the policy itself with
the adapter switched off: nothing else is trained, and model.path may not be an adapter (model.py), so
that is the very same model. Without one it costs the memory of one more set of float32 parameters,
sharded like the policy.
"""

import logging

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.config import RunConfig
from asyncrl.learner.model import Policy, Scores, shard

log = logging.getLogger(__name__)


class WithoutAdapter:
    """Scores as a policy does whose adapter was never trained."""

    def __init__(self, policy: Policy) -> None:
        assert policy.adapter is not None
        self._policy = policy
        self._adapter = policy.adapter

    def __call__(self, *arguments: object, **options: object) -> tuple[Tensor, Tensor]:
        """See Policy.forward."""
        with self._adapter.switched_off():
            logprobs, entropy = self._policy(*arguments, **options)
        return logprobs, entropy


def choose_reference(
    config: RunConfig, policy: Policy, *, mesh: DeviceMesh | None
) -> Scores | None:
    """The reference policy of a run; None without a KL term.

    Raises:
        ConfigError: model.path cannot be loaded.
    """
    if config.algorithm.kl.kind != "none" and policy.adapter is not None:
        log.info("KL reference: the model of %s, the adapter switched off", config.model.path)
        return WithoutAdapter(policy)
    device = next(policy.parameters()).device
    return load_reference(config, device=device, compute_dtype=policy.compute_dtype, mesh=mesh)


def load_reference(
    config: RunConfig, *, device: torch.device, compute_dtype: torch.dtype, mesh: DeviceMesh | None
) -> Policy | None:
    """A second model as the reference, computing in the policy's type; None without a KL term.

    Raises:
        ConfigError: model.path cannot be loaded.
    """
    if config.algorithm.kl.kind == "none":
        return None
    reference = Policy.load(config.model.path, device=device, compute_dtype=compute_dtype)
    reference.requires_grad_(False)
    if mesh is not None:
        shard(reference, mesh)
    log.info("KL reference: the model of %s, frozen", config.model.path)
    return reference
