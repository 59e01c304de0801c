"""What deserves attention: one table of metric, threshold and advice, watched once a step.

An alert fires when its metric was beyond the threshold in as many steps in a row as the table says, and
stays on until one step is not. A step without the metric counts as none. Every record lists the
`alerts` that are on by name, and as `new_alerts` what began with it, in words.

Thresholds without a source are ours, and meant as a reason to look, not as a verdict. Sources: k3,
NeMo-RL docs/guides/grpo.md; weights, ESS and chi2, verl docs/algo/rollout_corr.md; gradient spikes with
a falling ESS before a collapse, arXiv:2602.17616; aligned gradients, arXiv:2603.01501.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Alert:
    """One row: `metric` above (or below) `threshold` in `num_steps` steps in a row."""

    name: str
    metric: str
    side: Literal["above", "below"]
    threshold: float
    num_steps: int
    advice: str

    def is_beyond(self, value: float) -> bool:
        """Whether one value is on the wrong side."""
        return value > self.threshold if self.side == "above" else value < self.threshold

    def describe(self, value: float) -> str:
        """One line: what, how far, since when, and what to do."""
        since = "in this step" if self.num_steps == 1 else f"for {self.num_steps} steps"
        return (
            f"{self.name}: {self.metric}={value:.4g}, {self.side} {self.threshold:g} "
            f"{since}; {self.advice}"
        )


ALERTS: tuple[Alert, ...] = (
    Alert(
        "engine_mismatch", "mismatch/k3_numerics", "above", 0.01, 3,
        "engine and learner disagree under equal weights, in completions that saw no others: compare "
        "their dtypes, temperature and kernels; no staleness bound helps",
    ),
    Alert(
        "mismatch_lowest_bound", "staleness/engine_mismatch", "above", 0.5, 1,
        "still diverging at the lowest staleness bound: compare engine and learner numerics",
    ),
    Alert(
        "mismatch", "mismatch/k3", "above", 0.01, 10,
        "the policy leaves its sampler behind: lower pipeline.max_staleness or "
        "optimizer.learning_rate",
    ),
    Alert(
        "mismatch_critical", "mismatch/k3", "above", 0.1, 3,
        "the batch is from another policy: lower pipeline.max_staleness or optimizer.learning_rate",
    ),
    Alert(
        "divergence", "mismatch/exp_abs", "above", 1.20, 3,
        "probabilities are off by more than 20 %: lower pipeline.max_staleness, or let "
        "pipeline.adaptive_staleness do it",
    ),
    Alert(
        "variance", "mismatch/chi2", "above", 1.0, 3,
        "a few tokens carry the importance weights: lower algorithm.correction.cap or "
        "pipeline.max_staleness",
    ),
    Alert(
        "effective_sample", "correction/ess", "below", 0.3, 3,
        "few tokens carry the step: with a sequence weight the completions are too long for it, use "
        "algorithm.correction.kind=token_tis; else lower pipeline.max_staleness",
    ),
    Alert(
        "weights_low", "correction/weight", "below", 0.5, 3,
        "the weights shrink the gradient: a sequence weight on long completions, or a mask that drops "
        "too much",
    ),
    Alert(
        "weights_high", "correction/weight", "above", 2.0, 3,
        "the weights blow the gradient up: lower algorithm.correction.cap",
    ),
    Alert(
        "truncated", "correction/truncated", "above", 0.05, 10,
        "many weights are cut down: the correction is biased; lower pipeline.max_staleness",
    ),
    Alert(
        "dropped", "correction/dropped", "above", 0.3, 3,
        "masks and rejections leave little to train on: widen algorithm.correction bounds",
    ),
    Alert(
        "nonfinite", "mismatch/nonfinite", "above", 0.0, 1,
        "the engine reports log-probs that are no numbers: see logs of the generators",
    ),
    Alert(
        "clamped", "mismatch/clamped", "above", 0.0, 1,
        "tokens whose probabilities differ by e^20: wrong tokens, weights or temperature on one side",
    ),
    Alert(
        "clipped", "ratio/clipped_high", "above", 0.2, 3,
        "updates overshoot the clip: lower optimizer.learning_rate or algorithm.num_minibatches",
    ),
    Alert(
        "clipped_low", "ratio/clipped_low", "above", 0.2, 3,
        "updates overshoot the clip on the way down: lower optimizer.learning_rate or "
        "algorithm.num_minibatches",
    ),
    # Three steps: near its end a run measures few tokens, and their entropy halves by chance.
    Alert(
        "entropy_collapse", "policy/entropy_ratio", "below", 0.5, 3,
        "the policy lost half of its entropy within five steps: as it should while reward/mean nears "
        "its maximum; else lower optimizer.learning_rate, raise algorithm.loss.clip_high, or add "
        "algorithm.entropy_bonus",
    ),
    Alert(
        "gradient_spike", "optimizer/grad_norm_ratio", "above", 5.0, 1,
        "a gradient five times the usual: look at mismatch/ess and at this step's rollouts",
    ),
    Alert(
        "gradients_aligned", "optimizer/grad_cosine", "above", 0.3, 5,
        "consecutive gradients point the same way: staleness repeats one update; lower "
        "optimizer.learning_rate or pipeline.max_staleness",
    ),
    Alert(
        "no_signal", "groups/frac_teaching", "below", 0.1, 5,
        "nine of ten groups teach nothing: as it should be once reward/mean is at its maximum; else with "
        "groups/frac_mixed as low their scores are equal (change the task's difficulty or "
        "pipeline.group_size), without it completions are cut off (raise engine.max_completion_tokens)",
    ),
    Alert(
        "unscored", "rollouts/unscored_frac", "above", 0.1, 3,
        "completions get no score: the scorer raises, or takes longer than scoring.deadline_s; why is on "
        "each rollout (asyncrl report) and in the generators' logs",
    ),
)  # fmt: skip


def about_staleness(names: Iterable[str]) -> list[str]:
    """Those alerts among `names` whose advice speaks of staleness: a larger bound helps none of them."""
    on = set(names)
    return [alert.name for alert in ALERTS if alert.name in on and "staleness" in alert.advice]


class Watch:
    """Counts the steps of each alert."""

    def __init__(self, alerts: tuple[Alert, ...] = ALERTS) -> None:
        self._alerts = alerts
        self._num_beyond = {alert.name: 0 for alert in alerts}

    def step(self, metrics: Mapping[str, object]) -> tuple[list[Alert], list[Alert]]:
        """Take one step's record; returns the alerts that are on, and those that began with it."""
        on, began = [], []
        for alert in self._alerts:
            value = metrics.get(alert.metric)
            if not isinstance(value, float):
                if self._num_beyond[alert.name] >= alert.num_steps:
                    on.append(alert)
                continue
            beyond = alert.is_beyond(value)
            count = self._num_beyond[alert.name] + 1 if beyond else 0
            self._num_beyond[alert.name] = count
            if count >= alert.num_steps:
                on.append(alert)
            if count == alert.num_steps:
                began.append(alert)
        return on, began


class Trends:
    """Metrics relative to the run's own past.

    policy/entropy_ratio        entropy over that of five measured steps before
    optimizer/grad_norm_ratio   gradient norm over the median of the last 50, once there are 10
    """

    def __init__(self) -> None:
        self._entropies: deque[float] = deque(maxlen=5)
        self._norms: deque[float] = deque(maxlen=50)

    def step(self, values: Mapping[str, float]) -> dict[str, float]:
        """Take one step's values; the norm is compared with the steps before it."""
        found = {}
        entropy, norm = values.get("policy/entropy"), values.get("optimizer/grad_norm")
        if entropy is not None:
            if len(self._entropies) == 5 and self._entropies[0] > 0:
                found["policy/entropy_ratio"] = entropy / self._entropies[0]
            self._entropies.append(entropy)
        if norm is not None and math.isfinite(norm):
            usual = statistics.median(self._norms) if len(self._norms) >= 10 else 0.0
            if usual > 0:
                found["optimizer/grad_norm_ratio"] = norm / usual
            self._norms.append(norm)
        return found
