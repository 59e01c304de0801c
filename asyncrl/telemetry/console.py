"""The live view: one line a step and one an evaluation, read from the run folder's records."""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import PipelineConfig
from asyncrl.telemetry.attribution import record_shares, run_times
from asyncrl.telemetry.bottleneck import Split, diagnose
from asyncrl.telemetry.jsonlines import parse

_PHASES = ("wait_batch", "forward", "backward", "optimizer", "snapshot", "checkpoint")


class Follower:
    """Yields each record of a growing JSON-lines file once.

    A resumed learner replaces the file by one without the steps that it makes again
    (sinks.set_later_aside): such a file is read from its start, and what was yielded is passed over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._yielded: set[int] = set()  # hashes of lines

    def new(self) -> Iterator[dict[str, Any]]:
        """Objects whose line is complete; other lines, and a file that cannot be read, have none."""
        try:
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if hash(line) not in self._yielded and (record := parse(line)) is not None:
                    self._yielded.add(hash(line))
                    yield record


def step_line(
    record: Mapping[str, Any], pipeline: PipelineConfig, split: Split | None = None
) -> str:
    """One step by its number, as in metrics.jsonl, and the version that it makes: reward, staleness, both
    sides' rates and busy shares, where the learner's time went; below it, which side waits and what would
    help, and what began to deserve attention.
    """

    def number(name: str, form: str = ".2f") -> str:
        return format(record[name], form) if name in record else "-"

    step_s = record["time/step_s"]
    shares = [
        f"{phase} {100 * record[f'time/{phase}_s'] / step_s:.0f}%"
        for phase in _PHASES
        if step_s > 0 and record.get(f"time/{phase}_s", 0.0) / step_s >= 0.01
    ]
    max_staleness = pipeline.max_staleness
    bound = record.get("staleness/bound", max_staleness)
    limit = f"{max_staleness}" if bound == max_staleness else f"{max_staleness}, bound {bound:.0f}"
    unscored = ""
    if record.get("rollouts/unscored_frac"):
        unscored = f" ({record['rollouts/unscored_frac']:.0%} unscored)"
    dropped = dropped_groups(record)
    lost = (
        f"  dropped {dropped} of {record['ledger/admitted']:.0f} groups so far" if dropped else ""
    )
    skipped = f"  no update: {record['skipped']}" if record.get("skipped") else ""
    waits = diagnose(record_shares(record), split, alerts=record.get("alerts", ()))
    advice = f"\n  {waits.text}" if waits.limit != "none" else ""
    alerts = "".join(f"\n  ALERT {text}" for text in record.get("new_alerts", ()))
    return (
        f"step {record['step']:>3} -> version {record['version']:>3}/{pipeline.num_steps}  "
        f"reward {number('reward/mean')}{unscored}  staleness {number('staleness/mean')} "
        f"(max {number('staleness/max', '.0f')} of {limit})  "
        f"generate {number('rate/sampled_tokens_per_s', '.0f')} tok/s "
        f"{number('generator/busy_frac', '.0%')} busy  train "
        f"{number('rate/trained_tokens_per_s', '.0f')} tok/s {number('learner/busy_frac', '.0%')} "
        f"busy  [{step_s:.1f} s: {', '.join(shares)}]{lost}{skipped}{advice}{alerts}"
    )


def dropped_groups(record: Mapping[str, Any]) -> int:
    """Groups that were sampled for nothing, as too old or without signal, up to this step."""
    return int(sum(value for name, value in record.items() if name.startswith("ledger/dropped")))


def eval_line(record: Mapping[str, Any]) -> str:
    """One evaluation. Records of earlier releases do not say of how many prompts the samples are."""
    samples = f"{record['num_samples'] + record['num_unscored']} samples"
    if "num_prompts" in record:
        samples += f" of {record['num_prompts']} prompts"
    if record["mean_score"] is None:
        return (
            f"held-out score unknown at version {record['version']} "
            f"(none of {samples} was scored, {record['seconds']:.0f} s)"
        )
    return (
        f"held-out score {record['mean_score']:.3f} at version {record['version']} "
        f"({record['num_samples']} of {samples} scored, {record['seconds']:.0f} s)"
    )


def read_records(path: Path) -> list[dict[str, Any]]:
    """All complete records of a JSON-lines file, [] if it does not exist."""
    return list(Follower(path).new())


def summary(run_dir: Path) -> dict[str, Any]:
    """What a run achieved, from its records: the numbers that results and READMEs quote."""
    steps = read_records(run_dir / "metrics.jsonl")
    evals = sorted(read_records(run_dir / "evals.jsonl"), key=lambda record: record["version"])
    found: dict[str, Any] = {"steps": len(steps)}
    if steps:
        # Not from time_s, which begins again with every attempt of a resumed run.
        found["train_minutes"] = round(sum(record["time/step_s"] for record in steps) / 60, 2)
    # A step that trained no token, or got no score, has no such entry.
    if ages := [record["staleness/max"] for record in steps if "staleness/max" in record]:
        found["max_staleness"] = int(max(ages))
    if means := [record["staleness/mean"] for record in steps if "staleness/mean" in record]:
        found["mean_staleness"] = round(statistics.fmean(means), 3)
    if rewards := [record["reward/mean"] for record in steps if "reward/mean" in record]:
        found["reward_first"] = round(rewards[0], 4)
        found["reward_last"] = round(rewards[-1], 4)
    if steps and (dropped := dropped_groups(steps[-1])):
        found["dropped_groups"] = dropped
    return found | (_held_out(evals) if evals else {}) | run_times(run_dir)


def _held_out(evals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same of the evaluations, at least one, by version."""
    found: dict[str, Any] = {}
    ends = {"held_out_before": evals[0]}
    if evals[-1]["version"] > evals[0]["version"]:
        ends["held_out_after"] = evals[-1]
    for name, end in ends.items():
        if end["mean_score"] is not None:
            found[name] = round(end["mean_score"], 4)
    found["held_out_samples"] = evals[-1]["num_samples"]
    if "num_prompts" in evals[-1]:
        found["held_out_prompts"] = evals[-1]["num_prompts"]
    scored = [e for e in evals if e["mean_score"] is not None]
    found["held_out_curve"] = [[e["version"], round(e["mean_score"], 4)] for e in scored]
    return found
