"""What the page says about names: metrics, causes of time, drop reasons, fates of rollouts."""

from typing import Any

from asyncrl.telemetry.alerts import ALERTS
from asyncrl.telemetry.metrics import METRICS

CAUSES = {
    "wait_batch": "idle: has no batch to train on",
    "wait_credit": "idle: the broker admits no group, the learner is behind",
    "wait_score": "idle: all is sampled, verdicts are out",
    "wait_weights": "idle without credit, a newer version being on its way",
    "decode": "samples tokens",
    "prefill": "reads prompts",
    "eval": "evaluates held-out problems (learner: waits for the last evaluation)",
    "adopt": "swaps weights, decoding stands still",
    "canary": "checks that engine and learner agree",
    "probe": "scores the canary's tokens",
    "build": "advantages, packing, the staleness check",
    "forward": "forward passes and loss",
    "backward": "backward passes",
    "optimizer": "gradient clipping and optimizer",
    "snapshot": "copies weights for publication",
    "checkpoint": "saves a checkpoint",
    "record": "writes rollouts and metrics",
    "score": "judges completions",
    "idle": "waits for a message",
    "start": "loads and joins",
    "other": "everything without a name here",
}

REASONS = {
    "zero_signal": "all scores of the group were equal, so nothing could be learned from it "
    '(pipeline.zero_signal="drop")',
    "unscored": "no rollout of the group got a score (scoring.deadline_s, or see logs/)",
    "all_unscored": "no rollout of the group got a score (scoring.deadline_s, or see logs/)",
    "timeout": "it was not finished within pipeline.group_timeout_s",
    "generator_lost": "its generator died or left; the prompt is started again elsewhere",
    "prompt_too_long": "the prompt does not fit engine.max_prompt_tokens; it is given up",
    "aborted": "the engine gave a completion up",
    "bad_logprobs": "the engine reported log-probs that are none",
    "engine_error": "the engine failed",
}

FATES = {
    "trained": "its tokens pulled on the policy",
    "zero_advantage": "counted, but its advantage is 0: every score of its group was equal, or it was "
    "exactly average",
    "unscored": "the scorer gave no score (abstained, failed, or took too long): trains no token",
    "truncated": "ended by the length limit, which algorithm.mask_truncated leaves out",
    "aborted": "the engine gave it up: trains no token",
}


def glossary() -> dict[str, Any]:
    """All of them, by kind."""
    return {
        "metrics": {name: [metric.unit, metric.meaning] for name, metric in METRICS.items()},
        "causes": CAUSES,
        "reasons": REASONS,
        "fates": FATES,
        "alerts": {alert.name: [alert.metric, alert.advice] for alert in ALERTS},
    }
