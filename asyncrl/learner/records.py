"""What a step leaves behind: metric sums of the batch, one line a rollout, one record a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.learner.details import MEASURED, PROXIMAL, WEIGHT
from asyncrl.scores import judge
from asyncrl.telemetry.attribution import share_values, totals_shares
from asyncrl.types import Rollout, RolloutGroup
from asyncrl.wire.messages import Batch, EvalDone

_GENERATOR_BUSY = (
    "generator/decode", "generator/prefill", "generator/eval", "generator/adopt",
    "generator/canary",
)  # fmt: skip


def batch_sums(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Metric sums over a batch's rollouts and groups, trained or not."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = [r.verdict.score for r in rollouts if r.verdict.score is not None]
    best = max(scores, default=0.0)
    group_scores = [
        [r.verdict.score for r in group.rollouts if r.verdict.score is not None] for group in groups
    ]
    verdicts = [judge(scores) for scores in group_scores]
    sums = {
        "reward/mean": float(np.sum(scores)),
        "groups/frac_solved": float(
            sum(bool(s) and best > 0 and min(s) >= best for s in group_scores)
        ),
        "groups/frac_mixed": float(verdicts.count("signal")),
        "groups/frac_zero_signal": float(verdicts.count("zero_signal")),
        "rollouts/unscored_frac": float(len(rollouts) - len(scores)),
        "tokens/completion_mean": float(sum(len(r.completion_tokens) for r in rollouts)),
        "tokens/truncated_frac": float(sum(r.finish_reason == "length" for r in rollouts)),
    }
    if scores:
        sums["reward/std"] = float(np.std(scores))
    return sums


def ledger_values(batch: Batch) -> dict[str, float]:
    """The ledger's counts as metrics.

    Raises:
        AssertionError: the books do not close (a bug of the broker).
    """
    ledger = batch.ledger.model_dump()
    parts = sum(count for name, count in ledger.items() if name != "admitted")
    assert parts == ledger["admitted"], f"the ledger does not balance: {ledger}"
    return {f"ledger/{name}": float(count) for name, count in ledger.items()}


def generator_values(
    now: Mapping[str, float], before: Mapping[str, float], *, seconds: float, num_generators: int
) -> dict[str, float]:
    """Rates of all generators together, and everybody's shares of time, from running totals.

    A batch brings the totals of the moment in which it was handed over, long before its step ends if the
    learner is the slower side. So the time between `before` and `now` is the broker's own, which is in
    both. `seconds` stands for it where `before` is empty, which, with start-up behind it, has no shares.
    What no generator has counted yet has no rate: their reports are up to 0.25 s old, and the first steps
    of a short run are made of tokens that no report has brought.
    """
    values = {}
    if before:
        seconds = _elapsed_s(now, before) or seconds
    if any(name in now for name in _GENERATOR_BUSY):
        busy_s = sum(now.get(name, 0.0) - before.get(name, 0.0) for name in _GENERATOR_BUSY)
        values["generator/busy_frac"] = min(1.0, busy_s / (seconds * num_generators))
    if "sampled_tokens" in now:
        sampled = now["sampled_tokens"] - before.get("sampled_tokens", 0.0)
        values["rate/sampled_tokens_per_s"] = sampled / seconds
    return values | {
        "scoring/timeouts": now.get("verdict/timeout", 0.0),
        "scoring/errors": now.get("verdict/error", 0.0),
        "canary/distance": now.get("canary/distance", 0.0),
        "canary/checks": now.get("canary/checks", 0.0),
        "prompts/too_long": now.get("prompts/too_long", 0.0),
        **(share_values(totals_shares(now, before)) if before else {}),
    }


def _elapsed_s(now: Mapping[str, float], before: Mapping[str, float]) -> float:
    """The broker's seconds between two of its totals, which leave out no moment."""
    return sum(now[name] - before.get(name, 0.0) for name in now if name.startswith("broker/"))


def eval_values(evaluation: EvalDone) -> dict[str, float]:
    """An evaluation as metrics; without eval/score if no sample was scored."""
    score = evaluation.mean_score
    return {
        **({} if score is None else {"eval/score": score}),
        "eval/version": float(evaluation.version),
        "eval/unscored": float(evaluation.num_unscored),
        "eval/tokens_mean": evaluation.mean_tokens,
    }


def fate(rollout: Rollout, advantage: float, *, mask_truncated: bool) -> str:
    """What became of a rollout in its step: "trained", or why it did not teach."""
    if rollout.finish_reason == "abort":
        return "aborted"
    if rollout.verdict.score is None:
        return "unscored"
    if mask_truncated and rollout.finish_reason == "length":
        return "truncated"
    return "trained" if advantage != 0 else "zero_advantage"


def token_columns(
    rollout: Rollout, texts: Sequence[str], measured: NDArray[np.float64]
) -> dict[str, list[Any]]:
    """Facts of every token, one list each; null where there is no number.

    Args:
        rollout: of C tokens.
        texts: theirs.
        measured: [3, C], rows as in details.py; all 0 if it did not go through the forward pass.
    """
    missing = measured[MEASURED] == 0

    def column(values: NDArray[np.floating[Any]], blank: NDArray[np.bool_]) -> list[float | None]:
        blank = blank | ~np.isfinite(values)
        rounded = np.round(values.astype(np.float64), 4).tolist()
        return [None if b else v for b, v in zip(blank.tolist(), rounded, strict=True)]

    return {
        "text": list(texts),
        "behaviour_logprobs": column(rollout.behaviour_logprobs, np.zeros_like(missing)),
        "proximal_logprobs": column(measured[PROXIMAL], missing),
        "behaviour_weights": column(measured[WEIGHT], missing),
    }


def rollout_record(
    step: int, group: RolloutGroup, index: int, rollout: Rollout, *, generator: str
) -> dict[str, Any]:
    """One rollout of a step's batch as a line of rollouts.jsonl."""
    return {
        "step": step,
        "group_id": group.group_id,
        "index": index,
        "ordinal": group.ordinal,
        "generator": generator,
        "prompt": group.prompt_text,
        "answer": group.answer,
        "text": rollout.text,
        "score": rollout.verdict.score,
        "verdict": rollout.verdict.status,
        "detail": rollout.verdict.detail,
        "finish_reason": rollout.finish_reason,
        "num_tokens": len(rollout.completion_tokens),
        "version_spans": [[s.version, s.start, s.end] for s in rollout.version_spans],
        "mean_behaviour_logprob": round(float(np.mean(rollout.behaviour_logprobs)), 5),
    }
