"""GSPO: one ratio for the whole completion, its tokens' geometric mean, clipped as one.

    s_i  = exp(1/T_i sum_{t in i} log(pi_theta(t) / pi_prox(t)))
    l_t  = -min(s_i A_t, clip(s_i, 1 - low, 1 + high) A_t)
    token_level:  s_i is replaced by  sg[s_i] pi_theta(t) / sg[pi_theta(t)]

T_i is the number of tokens of completion i that count, never a padded width. Both forms have the same
value, and the same gradient when weight and advantage are equal over a completion. Where they are not,
the direct form spreads their mean over all of its tokens, so that even a token of weight 0 is pulled;
the token-level form gives every token its own.

| region                 | gradient in log pi_theta(t)                    | counted as         |
|------------------------|------------------------------------------------|--------------------|
| A > 0 and s > 1 + high | 0                                              | ratio/clipped_high |
| A < 0 and s < 1 - low  | 0                                              | ratio/clipped_low  |
| elsewhere              | -s_i mean_{u in i}(w_u A_u); token_level: -w_t A_t s_i |            |

Guards: guards.py; the mean log-ratio is clamped to +-20. Defaults: low 3e-4, high 4e-4; meant for
algorithm.aggregation = "sequence_mean".

Source: arXiv:2507.18071 eq. 5-7 and 13-15.
"""

from torch import Tensor

from asyncrl.algo.clipped import clip
from asyncrl.algo.guards import (
    bounded_exp,
    clean,
    num_beyond,
    sum_by_sequence,
    weighted_mean,
)
from asyncrl.algo.tokens import TokenBatch


def gspo_loss(
    batch: TokenBatch, *, num_tokens: int, clip_low: float, clip_high: float, token_level: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """See the module; bounds as in clipped_loss, on s_i."""
    tokens = clean(batch)
    # A token that does not count has log-ratio 0, and 0 in the length.
    length = sum_by_sequence(tokens.counts.to(tokens.logprobs.dtype), tokens.sequence).clamp(min=1)
    log_ratio = sum_by_sequence(tokens.logprobs - tokens.proximal, tokens.sequence) / length
    ratio, advantages = bounded_exp(log_ratio), tokens.advantages
    if token_level:
        ratio = ratio.detach() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return weighted_mean(
        tokens,
        clip(ratio, advantages, clip_low, clip_high),
        num_tokens=num_tokens,
        clipped_high=((advantages > 0) & (ratio > 1 + clip_high)).sum(),
        clipped_low=((advantages < 0) & (ratio < 1 - clip_low)).sum(),
        clamped=num_beyond(log_ratio.where(tokens.counts, 0.0)),
    )
