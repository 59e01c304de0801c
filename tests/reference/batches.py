"""Token batches as the learner would make them, from lists of scalar tokens, and strategies for those."""

import math
from collections import Counter

import numpy as np
import torch
from hypothesis import strategies as st

from asyncrl.algo import AGGREGATIONS
from asyncrl.algo.corrections import correct
from asyncrl.algo.tokens import TokenBatch
from tests.reference.scalar_loss import Token

garbage = st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
logprob = st.one_of(st.floats(-70, 0), st.floats(-3, 0), st.just(0.0))
shift = st.one_of(st.floats(-60, 60), st.floats(-1, 1), st.floats(-1e-3, 1e-3), st.just(0.0))
advantage = st.one_of(st.floats(-5, 5), st.just(0.0))


@st.composite
def trained_token(draw):
    """Log-ratios to +-60 either way, log-probs never above 0; sometimes no usable mu."""
    proximal = draw(logprob)

    def moved():
        return min(0.0, proximal + draw(shift))

    behaviour = draw(not_finite) if draw(st.integers(0, 9)) == 0 else moved()
    return Token(moved(), proximal, behaviour, draw(advantage), True)


hole = st.builds(Token, garbage, garbage, garbage, garbage, st.just(False))


@st.composite
def completions(draw, max_completions=4, max_tokens=6):
    """Tokens of several completions, masks with holes, at times with nothing trained at all."""
    one = hole if draw(st.integers(0, 19)) == 0 else st.one_of(trained_token(), hole)
    tokens = []
    for sequence in range(draw(st.integers(1, max_completions))):
        for token in draw(st.lists(one, min_size=1, max_size=max_tokens)):
            tokens.append(in_sequence(token, sequence))
    return tokens


def in_sequence(token, sequence):
    return Token(
        token.logprob, token.proximal, token.behaviour, token.advantage, token.trained, sequence
    )


def num_trained(tokens):
    return sum(token.trained for token in tokens)


def scales(tokens, aggregation="token_mean", *, constant=7, prompts=None):
    """By completion, from the counts of all `tokens`: what build_step puts into a micro-batch."""
    lengths = Counter(token.sequence for token in tokens if token.trained)
    sequences = sorted(lengths)
    prompts = prompts or list(range(1 + max(sequences, default=0)))
    if not sequences:
        return {}
    values = AGGREGATIONS[aggregation](
        np.array([lengths[s] for s in sequences]),
        np.array([prompts[s] for s in sequences]),
        constant=constant,
    )
    return dict(zip(sequences, values.tolist(), strict=True))


def batch_of(tokens, *, scale=None, tis_cap=None, dtype=torch.float64) -> TokenBatch:
    """One micro-batch; `scale` is by completion, and 1 without it."""

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(t, name) for t in tokens], dtype=torch.float64).to(dtype)

    local = {s: index for index, s in enumerate(dict.fromkeys(t.sequence for t in tokens))}
    batch = TokenBatch(
        logprobs=column("logprob").requires_grad_(),
        proximal_logprobs=column("proximal"),
        behaviour_logprobs=column("behaviour"),
        advantages=column("advantage"),
        completion_mask=torch.tensor([t.trained for t in tokens], dtype=torch.bool),
        staleness=torch.zeros(len(tokens), dtype=torch.int32),
        sequence=torch.tensor([local[t.sequence] for t in tokens], dtype=torch.int64),
        behaviour_weights=torch.ones(len(tokens), dtype=dtype),
        scale=torch.tensor(
            [1.0 if scale is None else scale.get(t.sequence, math.nan) for t in tokens], dtype=dtype
        ),
    )
    if tis_cap is None:
        return batch
    return batch._replace(behaviour_weights=correct(batch, weight="token", cap=tis_cap).weights)
