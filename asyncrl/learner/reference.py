"""The reference policy: the initial model, frozen, for a KL term only.

It is loaded from model.path, also when a run resumes from a checkpoint: the reference does not move.
With several ranks it is sharded like the policy. It costs the memory of one more set of float32
parameters, and one forward pass without gradients a micro-batch.
"""

import logging

import torch
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.config import RunConfig
from asyncrl.learner.model import Policy, shard

log = logging.getLogger(__name__)


def load_reference(
    config: RunConfig, *, device: torch.device, compute_dtype: torch.dtype, mesh: DeviceMesh | None
) -> Policy | None:
    """The reference policy, computing in the policy's own type; None without a KL term.

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
