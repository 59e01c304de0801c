"""The learner's parts with the settings that tests share, and log-probs by the plain library call."""

from functools import partial

import torch

from asyncrl.algo import ADVANTAGES, LOSSES
from asyncrl.learner.batch import build_step
from asyncrl.learner.model import Policy
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.step import Optimizer, train_step
from asyncrl.telemetry.trace import Tracer

LOSS = partial(LOSSES["clipped"], clip_low=0.2, clip_high=0.28, dual_clip=3.0, tis_cap=2.0)
BETA1 = 0.9
ALONE = Ranks()


def load_policy(path, *, compute_dtype=torch.float32):
    return Policy.load(path, device=torch.device("cpu"), compute_dtype=compute_dtype)


def make_optimizer(policy, **changes):
    arguments = {
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
        "beta1": BETA1,
        "beta2": 0.999,
        "max_grad_norm": 1e9,
        "num_warmup_steps": 0,
    }
    return Optimizer(policy, **(arguments | changes))


def pack(groups, **changes):
    arguments = {
        "version": 0,
        "max_staleness": 0,
        "advantage": ADVANTAGES["mean_std"],
        "share_prompts": True,
        "micro_batch_tokens": 256,
        "skip_zero_advantage": False,
    }
    return build_step(groups, **(arguments | changes))


def run_step(policy, optimizer, step, *, ranks=ALONE, tracer=None):
    return train_step(
        policy,
        optimizer,
        step,
        loss=LOSS,
        temperature=1.0,
        ranks=ranks,
        tracer=tracer or Tracer(None, process="test"),
    )


def everything(policy, optimizer):
    """Copies of all weights and of Adam's whole state."""
    tensors = {name: parameter.detach().clone() for name, parameter in policy.named_weights()}
    for name, parameter in optimizer.parameters.items():
        for key, value in optimizer.adam.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.clone()
    return tensors


def identical(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """[C] by the library's own forward pass over one sequence and a log-softmax of its logits."""
    sequence = torch.tensor([*prompt.tolist(), *completion.tolist()])
    logits = model(input_ids=sequence[None]).logits[0] / temperature
    table = logits.log_softmax(-1)[:-1]
    return table.gather(1, sequence[1:, None])[len(prompt) - 1 :, 0]
