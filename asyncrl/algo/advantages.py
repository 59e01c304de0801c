"""Advantages: how much better a completion scored than its group. All groups of a step at once, float64.

With the scores r_i of a group, their mean, and the completions' lengths L_i in tokens:

| name           | A_i                                                | source                    |
|----------------|----------------------------------------------------|---------------------------|
| mean_std       | (r_i - mean) / (std + 1e-4), std with ddof 1       | arXiv:2402.03300          |
| mean           | r_i - mean                                         | arXiv:2503.20783          |
| leave_one_out  | r_i - mean of the others = n/(n-1) (r_i - mean)    | arXiv:2402.14740          |
| batch_std      | (r_i - mean) / (std over the batch + 1e-4)         | arXiv:2508.08221          |
| length_weighted| r_i - sum_j L_j r_j / sum_j L_j                    | arXiv:2505.23585 (OPO)    |
| max_rl         | (r_i - mean) / mean, scores >= 0                   | arXiv:2602.02710          |
| raw            | r_i                                                | REINFORCE                 |

Dr. GRPO is `mean` with algorithm.aggregation = constant_length. length_weighted is the baseline of
least variance when a gradient's square grows with the length. Dividing by a group's own std (or mean)
weighs easy and hard prompts differently; the batch's std does not.

NaN means "not scored": it is outside mean and spread, and gets advantage 0. A group with fewer than
two scores has nothing to compare with, and one whose scores are all equal teaches nothing: exactly
0, but for `raw`, which compares with nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Lengths = NDArray[np.int64]
Advantage = Callable[[Sequence[Scores], Sequence[Lengths]], list[Scores]]
"""(scores, lengths), one [G] each per group, scores NaN where unscored, lengths in completion tokens
-> one [G] of advantages per group, 0 where unscored."""

STD_FLOOR = 1e-4
"""Added to the spread, so that scores differing only by rounding give no large advantages."""


def mean_std(scores: Sequence[Scores], lengths: Sequence[Lengths]) -> list[Scores]:
    """Centred on the group's mean and divided by its sample standard deviation plus 1e-4."""
    found = []
    for group in scores:
        centred, scored = _centre(group)
        freedom = max(1, scored.sum() - 1)
        found.append(centred / (np.sqrt(np.square(centred).sum() / freedom) + STD_FLOOR))
    return found


def mean(scores: Sequence[Scores], lengths: Sequence[Lengths]) -> list[Scores]:
    """Centred on the group's mean."""
    return [_centre(group)[0] for group in scores]


def leave_one_out(scores: Sequence[Scores], lengths: Sequence[Lengths]) -> list[Scores]:
    """Centred on the mean of the group's other scores."""
    found = []
    for group in scores:
        centred, scored = _centre(group)
        num_scored = scored.sum()
        found.append(centred * (num_scored / max(1, num_scored - 1)))
    return found


def batch_std(scores: Sequence[Scores], lengths: Sequence[Lengths]) -> list[Scores]:
    """Centred on the group's mean; divided by the deviation (ddof 1) of all scores of the step."""
    known = [group[~np.isnan(group)] for group in scores]
    everything = np.concatenate([np.zeros(0), *known])
    spread = everything.std(ddof=1) if len(everything) > 1 else 0.0
    return [_centre(group)[0] / (spread + STD_FLOOR) for group in scores]


def length_weighted(scores: Sequence[Scores], lengths: Sequence[Lengths]) -> list[Scores]:
    """Minus the group's mean score, weighted by length."""
    found = []
    for group, sizes in zip(scores, lengths, strict=True):
        centred, scored = _centre(group)
        total = sizes[scored].sum()
        # A group without a token has nothing to weigh, and nothing to train.
        shift = centred[scored] @ sizes[scored] / total if total else 0.0
        found.append(np.where(scored & centred.any(), centred - shift, 0.0))
    return found


def max_rl(scores: Sequence[Scores], lengths: Sequence[Lengths]) -> list[Scores]:
    """Centred on the group's mean and divided by it.

    Raises:
        ValueError: a score is negative.
    """
    found = []
    for group in scores:
        centred, scored = _centre(group)
        if (group[scored] < 0).any():
            raise ValueError(
                f'algorithm.advantage="max_rl" needs scores >= 0, got {group[scored].min():g}'
            )
        middle = group[scored].mean() if centred.any() else 1.0
        found.append(centred / middle)
    return found


def raw(scores: Sequence[Scores], lengths: Sequence[Lengths]) -> list[Scores]:
    """The scores themselves."""
    return [np.nan_to_num(group, nan=0.0) for group in scores]


def overlong_penalty(lengths: Lengths, *, max_completion_tokens: int, buffer_tokens: int) -> Scores:
    """What a long completion's score is lowered by: a slope before the limit instead of a cliff.

        0                              up to max - buffer
        -(L - (max - buffer)) / buffer from there to max, where it is -1; no lower beyond

    Args:
        lengths: completion tokens, any shape.
        max_completion_tokens: the engine's limit.
        buffer_tokens: >= 1, length of the slope.

    Source: arXiv:2503.14476 eq. 13.
    """
    over = lengths - (max_completion_tokens - buffer_tokens)
    return -np.clip(over / buffer_tokens, 0.0, 1.0)


def with_overlong_penalty(
    advantage: Advantage, *, max_completion_tokens: int, buffer_tokens: int
) -> Advantage:
    """The same advantage of scores that were lowered by `overlong_penalty` first."""

    def shaped(scores: Sequence[Scores], lengths: Sequence[Lengths]) -> list[Scores]:
        lowered = [
            group
            + overlong_penalty(
                sizes, max_completion_tokens=max_completion_tokens, buffer_tokens=buffer_tokens
            )
            for group, sizes in zip(scores, lengths, strict=True)
        ]
        return advantage(lowered, lengths)

    return shaped


def _centre(scores: Scores) -> tuple[Scores, NDArray[np.bool_]]:
    """Scores minus their mean (0 where unscored, or where all are equal), and which are scored."""
    scored = ~np.isnan(scores)
    centred = np.zeros(scores.shape, np.float64)
    # The mean of equal floats may be off by one rounding (0.1 three times): ask first.
    if scored.sum() >= 2 and np.ptp(scores[scored]) > 0:
        centred[scored] = scores[scored] - scores[scored].mean()
    return centred, scored
