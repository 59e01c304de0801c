"""Every metric, declared once: name, unit, how it is reduced, what it means.

Code emits sums and counts; `resolve` is the one place that divides, after sums were reduced over ranks.
A name may carry "@...", a bucket: the staleness d, or a cause of telemetry/attribution.py; it then shares
the declaration of the part before it. A name that is not declared here raises, so a typo cannot make a
new curve.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["token", "measured", "sequence", "rollout", "scored", "group", "check", "value"]
"""What a sum is divided by: trained tokens (N), tokens and completions that went through the forward
pass, rollouts, scored rollouts, groups, canary checks; or nothing."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of one metric."""

    unit: str
    reduction: Reduction
    meaning: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("score", "scored", "mean score of the batch"),
    "reward/std": Metric("score", "value", "standard deviation of the scores over the batch"),
    "groups/frac_teaching": Metric("1", "group", "groups with a trained token of advantage not 0"),
    "groups/frac_mixed": Metric("1", "group", "groups whose scores differ"),
    "groups/frac_zero_signal": Metric("1", "group", "groups of equal scores, or of only one"),
    "groups/frac_solved": Metric("1", "group", "groups with every score at the batch's maximum"),
    "rollouts/unscored_frac": Metric("1", "rollout", "rollouts without a score (timeout, error)"),
    "tokens/trained": Metric("tokens", "value", "N: completion tokens that count in the loss"),
    "tokens/completion_mean": Metric("tokens", "rollout", "sampled tokens of a rollout"),
    "tokens/truncated_frac": Metric("1", "rollout", "rollouts that ended by the length limit"),
    "tokens/forward": Metric("tokens", "value", "tokens the learner computed, prompts included"),
    "staleness/mean": Metric("versions", "token", "staleness of the trained tokens"),
    "staleness/max": Metric("versions", "value", "staleness of the oldest trained token; <= k"),
    "staleness/tokens": Metric("tokens", "value", "trained tokens of staleness d"),
    "staleness/bound": Metric("versions", "value", "staleness bound for new groups; <= k"),
    "staleness/engine_mismatch": Metric("1", "value", "1: the lowest bound still diverges"),
    "staleness/span": Metric("versions", "value", "versions within one completion, minus 1, mean"),
    "staleness/queued_s": Metric("s", "group", "seconds a group waited in the queue"),
    "loss/policy": Metric("nats", "token", "policy loss"),
    "kl/loss": Metric("nats", "token", "KL term of the loss, coefficient included"),
    "kl/k1": Metric("nats", "measured", "KL(pi, reference) by k1, weighted with min(10, pi / mu)"),
    "kl/k3": Metric("nats", "measured", "the same by k3: never negative, low variance"),
    "ratio/clipped_high": Metric("1", "measured", "tokens clipped above (A > 0, or at a cap)"),
    "ratio/clipped_low": Metric("1", "measured", "tokens clipped below (A < 0)"),
    "ratio/dual_clipped": Metric("1", "measured", "tokens whose loss the dual clip bounds (A < 0)"),
    "ratio/capped": Metric("1", "measured", "tokens (A < 0) whose ratio TOPR caps; half is usual"),
    "ratio/masked": Metric("1", "measured", "tokens that the loss silenced"),
    "ratio/clamped": Metric("tokens", "value", "log-ratios of the loss beyond +-20, clamped"),
    "correction/weight": Metric("1", "measured", "behaviour weight"),
    "correction/truncated": Metric("1", "measured", "tokens whose weight was cut down to the cap"),
    "correction/raised": Metric("1", "measured", "tokens whose weight was raised to the floor"),
    "correction/masked_low": Metric("1", "measured", "tokens whose ratio lies below the mask"),
    "correction/masked_high": Metric("1", "measured", "tokens whose ratio lies above the mask"),
    "correction/dropped": Metric("1", "measured", "tokens of weight 0, for whatever reason"),
    "correction/ess": Metric("1", "value", "effective share of the tokens under the final weights"),
    "correction/weight_p1": Metric("1", "value", "1 % quantile of the final weights"),
    "correction/weight_p50": Metric("1", "value", "median of the final weights"),
    "correction/weight_p99": Metric("1", "value", "99 % quantile of the final weights"),
    "correction/sequences": Metric("completions", "value", "completions that were corrected"),
    "correction/rejected_sequences": Metric("1", "sequence", "completions rejected by a statistic"),
    "correction/vetoed_sequences": Metric("1", "sequence", "completions with an absurd ratio"),
    "correction/opsm_sequences": Metric("1", "sequence", "negative completions dropped by OPSM"),
    "mismatch/tokens": Metric("tokens", "value", "tokens the mismatch was measured on"),
    "mismatch/nonfinite": Metric("tokens", "value", "behaviour log-probs that were not finite"),
    "mismatch/clamped": Metric("tokens", "value", "log pi_prox / mu beyond +-20, clamped"),
    "mismatch/k1": Metric("nats", "value", "mean of log mu - log pi: KL(mu || pi)"),
    "mismatch/k3": Metric("nats", "value", "mean of e^y - 1 - y, y = log pi - log mu"),
    "mismatch/k3_numerics": Metric(
        "nats", "value", "mismatch/k3 of completions sampled under the step's weights alone"
    ),
    "mismatch/abs": Metric("nats", "value", "mean |log pi - log mu|"),
    "mismatch/exp_abs": Metric("1", "value", "mean exp |log pi - log mu|"),
    "mismatch/max": Metric("nats", "value", "largest |log pi - log mu|"),
    "mismatch/ess": Metric("1", "value", "effective sample size, share of tokens"),
    "mismatch/chi2": Metric("1", "value", "mean of (pi / mu)^2, minus 1"),
    "mismatch/abs_p99": Metric("nats", "value", "99 % quantile of |log pi - log mu|"),
    "mismatch/ratio_p1": Metric("1", "value", "1 % quantile of pi / mu"),
    "mismatch/ratio_p50": Metric("1", "value", "median of pi / mu"),
    "mismatch/ratio_p99": Metric("1", "value", "99 % quantile of pi / mu"),
    "mismatch/ppl_gap": Metric("nats", "value", "completions' mean of log mu - log pi a token"),
    "mismatch/ppl_ratio": Metric("1", "value", "perplexity of completions, learner's over mu's"),
    "mismatch/sequence_chi2": Metric("1", "value", "chi2 of whole completions' ratios"),
    "mismatch/sequence_ess": Metric("1", "value", "effective share of the completions"),
    "drift/k3": Metric("nats", "value", "mismatch/k3 of stale tokens minus that at staleness 0"),
    "policy/entropy": Metric("nats", "value", "entropy of the policy at the measured tokens"),
    "policy/entropy_ratio": Metric("1", "value", "entropy over that of five steps before"),
    "optimizer/grad_norm": Metric(
        "1", "value", "gradient norm before clipping, the largest of the step"
    ),
    "optimizer/grad_norm_ratio": Metric("1", "value", "gradient norm over the median of 50 steps"),
    "optimizer/grad_cosine": Metric("1", "value", "cosine of this gradient and the last, sampled"),
    "optimizer/learning_rate": Metric("1", "value", "learning rate of the step"),
    "optimizer/skipped": Metric("1", "value", "1 if the step changed no weight"),
    "optimizer/updates": Metric("updates", "value", "optimizer updates of the step"),
    "ledger/admitted": Metric(
        "groups", "value", "groups started so far in the history that survived"
    ),
    "ledger/trained": Metric("groups", "value", "groups trained so far, this batch included"),
    "ledger/dropped_stale": Metric("groups", "value", "groups dropped as too old"),
    "ledger/dropped_filtered": Metric("groups", "value", "groups dropped without signal"),
    "ledger/failed": Metric("groups", "value", "started groups that did not finish"),
    "ledger/queued": Metric("groups", "value", "finished groups waiting, at the hand-over"),
    "ledger/in_flight": Metric("groups", "value", "groups being sampled or scored, then"),
    "rate/trained_tokens_per_s": Metric("tokens/s", "value", "trained tokens over the step's time"),
    "rate/sampled_tokens_per_s": Metric(
        "tokens/s", "value", "of all generators, up to the hand-over"
    ),
    "learner/busy_frac": Metric("1", "value", "share of the step the learner computed"),
    "generator/busy_frac": Metric("1", "value", "share of the time up to the batch's hand-over"),
    "time/step_s": Metric("s", "value", "wall clock of the step"),
    "time/wait_batch_s": Metric("s", "value", "learner waiting for a batch"),
    "time/build_s": Metric("s", "value", "advantages, packing, staleness check"),
    "time/forward_s": Metric("s", "value", "forward passes and loss"),
    "time/backward_s": Metric("s", "value", "backward passes"),
    "time/optimizer_s": Metric("s", "value", "gradient clipping and optimizer"),
    "time/snapshot_s": Metric("s", "value", "copying weights for publication"),
    "time/probe_s": Metric("s", "value", "log-probs of the canary's fixed sequence"),
    "time/checkpoint_s": Metric("s", "value", "saving"),
    "time/record_s": Metric("s", "value", "writing rollouts and metrics"),
    "share/learner": Metric("1", "value", "rank 0's time by cause, over the last 1 s or the step"),
    "share/generator": Metric("1", "value", "all generators' time by cause, up to the hand-over"),
    "share/scorer": Metric("1", "value", "all scoring processes' time by cause, over the same"),
    "share/broker": Metric("1", "value", "the broker's time by cause, over the same"),
    "eval/score": Metric("score", "value", "mean score on held-out problems"),
    "eval/version": Metric("versions", "value", "version that eval/score belongs to"),
    "eval/unscored": Metric("samples", "value", "held-out samples without a score"),
    "eval/tokens_mean": Metric("tokens", "value", "mean completion tokens in the evaluation"),
    "scoring/timeouts": Metric("verdicts", "value", "verdicts that hit the deadline so far"),
    "scoring/errors": Metric("verdicts", "value", "verdicts that failed so far"),
    "canary/distance": Metric("nats", "check", "engine against learner on a fixed sequence, mean"),
    "canary/checks": Metric("checks", "value", "such comparisons so far, all generators"),
    "prompts/too_long": Metric("prompts", "value", "prompts skipped as too long so far"),
}


def resolve(sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
    """Divide sums by their counts.

    Args:
        sums: by metric name, "@d" allowed.
        counts: "token", "measured", "rollout", ...; a metric whose count is 0 is left out.

    Raises:
        KeyError: a name that METRICS does not declare.
    """
    resolved = {}
    for name, value in sums.items():
        metric = METRICS.get(name.partition("@")[0])
        if metric is None:
            raise KeyError(f"metric {name!r} is not declared in telemetry/metrics.py")
        divisor = 1.0 if metric.reduction == "value" else counts[metric.reduction]
        if divisor and math.isfinite(value):
            resolved[name] = value / divisor
    return resolved
