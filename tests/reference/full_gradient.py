"""The gradient of a whole update by plain forward passes, one rollout at a time, and the scalar loops."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.reference import scalar_loss
from tests.reference.scalar_loss import Token
from tests.reference.stepping import plain_logprobs


def plain_model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def advantages_of(item):
    scores = np.array([r.verdict.score for r in item.rollouts])
    if np.ptp(scores) == 0:
        return np.zeros(len(scores))
    return (scores - scores.mean()) / (scores.std(ddof=1) + 1e-4)


def full_gradient(
    model, groups, *, kind, settings, aggregation="token_mean", constant=20, tis_cap=2.0,
    version=0, proximal="current",
):  # fmt: skip
    """By parameter name; adds to nothing. `proximal` is a name, or the model that is pi_prox."""
    rows, tokens, prompts = [], [], []
    for prompt, item in enumerate(groups):
        for one, advantage in zip(item.rollouts, advantages_of(item), strict=True):
            row = plain_logprobs(model, item.prompt_tokens, one.completion_tokens)
            anchor = row.tolist()
            if isinstance(proximal, torch.nn.Module):
                with torch.no_grad():
                    anchor = plain_logprobs(
                        proximal, item.prompt_tokens, one.completion_tokens
                    ).tolist()
            for t, value in enumerate(row.tolist()):
                mu = float(one.behaviour_logprobs[t])
                if proximal == "interpolated":
                    d = version - int(one.token_versions[t])
                    anchor[t] = mu + d / (d + 1) * (value - mu)
                tokens.append(Token(value, anchor[t], mu, float(advantage), True, len(rows)))
            rows.append(row)
            prompts.append(prompt)
    _, slopes, _ = scalar_loss.evaluate(
        kind, tokens, settings=settings, aggregation=aggregation, constant=constant,
        prompts=prompts, tis_cap=tis_cap,
    )  # fmt: skip
    model.zero_grad()
    (torch.cat(rows) @ torch.tensor(slopes, dtype=torch.float32)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
