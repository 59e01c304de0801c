"""How much a token counts, by the completion it is in: the `scale` of TokenBatch. Numpy.

A loss is 1/N sum_t scale_t l_t, so scale 1 is the mean over tokens. With B trained completions, T_i the
trained tokens of completion i, N = sum T_i, and N_g those of prompt g out of P:

| name            | the update's loss                | scale of a token | a token weighs          |
|-----------------|----------------------------------|------------------|-------------------------|
| token_mean      | 1/N sum l_t                      | 1                | the same                |
| sequence_mean   | 1/B sum_i 1/T_i sum_{t in i} l_t | N / (B T_i)      | less in a long answer   |
| constant_length | 1/(B L) sum l_t                  | N / (B L)        | the same                |
| prompt_mean     | 1/P sum_g 1/N_g sum_{t in g} l_t | N / (P N_g)      | less beside long answers|

N, B and P are of the whole update, over all ranks and micro-batches, and counted before any
rejection, so that the gradient does not depend on how the update was cut. L is a number of the
config: no padded width ever enters. A completion without a trained token is in neither B nor P.

Sources: token mean, arXiv:2503.14476 eq. 8; means of means, arXiv:2402.03300 eq. 3; constant length,
arXiv:2503.20783; prompt mean, arXiv:2510.13786.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Scales = NDArray[np.float64]
Aggregation = Callable[[Counts, Counts], Scales]
"""(lengths, prompts) -> [B] scale of every token of each trained completion, once L is bound.

lengths: [B] T_i, at least 1 each; prompts: [B] which prompt the completion answers, from 0 on.
"""


def token_mean(lengths: Counts, prompts: Counts, *, constant: int) -> Scales:
    """Every token counts the same."""
    return np.ones(len(lengths))


def sequence_mean(lengths: Counts, prompts: Counts, *, constant: int) -> Scales:
    """Every completion counts the same."""
    return lengths.sum() / (len(lengths) * lengths)


def constant_length(lengths: Counts, prompts: Counts, *, constant: int) -> Scales:
    """Every token counts the same, in every step; `constant` is L >= 1, in tokens."""
    return lengths.sum() / (len(lengths) * np.full(len(lengths), float(constant)))


def prompt_mean(lengths: Counts, prompts: Counts, *, constant: int) -> Scales:
    """Every prompt counts the same, and its tokens within it."""
    num_tokens = np.bincount(prompts, weights=lengths)
    num_prompts = np.count_nonzero(num_tokens)
    return lengths.sum() / (num_prompts * num_tokens[prompts])
