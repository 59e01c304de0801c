"""The learner's parts with the settings that tests share, and log-probs by the plain library call."""

from dataclasses import replace
from functools import partial

import torch

from asyncrl.algo import ADVANTAGES, AGGREGATIONS
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.learner.batch import build_step
from asyncrl.learner.model import Policy
from asyncrl.learner.objective import Objective
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.step import train_step
from asyncrl.telemetry.trace import Tracer

OBJECTIVE = Objective.of(AlgorithmConfig())
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


def aggregation(name, constant=20):
    return partial(AGGREGATIONS[name], constant=constant)


def algorithm(kind="clipped", *, correction="token", loss=(), **settings):
    """The section `algorithm` with a loss, its settings as a dict, and a correction's weight."""
    tree = {"loss": {"kind": kind, **dict(loss)}, "correction": {"weight": correction}, **settings}
    return AlgorithmConfig.model_validate(tree)


def replace_micro_batches(step, micro_batches):
    """The same step of one update with other micro-batches, its counts unchanged."""
    (minibatch,) = step.minibatches
    minibatch = replace(minibatch, micro_batches=tuple(micro_batches))
    return replace(step, minibatches=(minibatch,))


def micro_batches(step):
    return [micro for minibatch in step.minibatches for micro in minibatch.micro_batches]


def pack(groups, **changes):
    arguments = {
        "version": 0,
        "max_staleness": 0,
        "advantage": ADVANTAGES["mean_std"],
        "aggregation": aggregation("token_mean"),
        "num_minibatches": 1,
        "mask_truncated": False,
        "share_prompts": True,
        "micro_batch_tokens": 256,
        "skip_zero_advantage": False,
    }
    return build_step(groups, **(arguments | changes))


def run_step(policy, optimizer, step, *, objective=OBJECTIVE, ranks=ALONE, tracer=None, **more):
    return train_step(
        policy,
        optimizer,
        step,
        objective=objective,
        temperature=1.0,
        ranks=ranks,
        tracer=tracer or Tracer(None, process="test"),
        **more,
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


def gradient_after_first_step(optimizer):
    """Adam's first moment is (1 - beta1) times the first gradient."""
    return {
        name: optimizer.adam.state[parameter]["exp_avg"] / (1 - BETA1)
        for name, parameter in optimizer.parameters.items()
    }


def assert_near(found, wanted, tolerance=1e-5):
    """Largest difference relative to the largest value of the tensor."""
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())
