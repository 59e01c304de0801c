"""Run folders as a run would leave them, with every number chosen here; no process is started."""

import json
import random
from pathlib import Path

CONFIG = """
name = "made"
seed = 7
[model]
path = "models/tiny"
[task]
kind = "repeat_letter"
[pipeline]
max_staleness = 2
groups_per_step = {groups}
group_size = {size}
num_steps = {steps}
"""


def write_lines(path: Path, records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def step_record(step: int, **values):
    """A step of 1 s, half of it spent waiting for the batch."""
    return {
        "step": step, "version": step + 1, "time_s": step + 1.0, "time/step_s": 1.0,
        "time/wait_batch_s": 0.5, "reward/mean": step / 100, "staleness/mean": 1.0,
        "staleness/max": 2.0, "staleness/tokens@0": 10.0, "staleness/tokens@2": 5.0,
        "mismatch/k3@0": 1e-6, "mismatch/k3@2": 0.25, "ledger/admitted": 4.0 * (step + 1),
        "ledger/trained": 4.0 * (step + 1), "ledger/queued": 0.0, "ledger/in_flight": 0.0,
        "share/learner@wait_batch": 0.5, "share/learner@forward": 0.5,
        "share/generator@decode": 1.0, "bottleneck": "generation", "alerts": [],
    } | values  # fmt: skip


def spans(step: int, middle: int, end: int):
    """Half from two versions before, half from one before, as far as there are any."""
    if step == 0:
        return [[0, 0, end]]
    older = max(0, step - 2)
    return [[older, 0, middle], [older + 1, middle, end]]


def rollout_record(step: int, group_id: int, index: int, **values):
    """Two tokens of two versions; no single token on record."""
    return {
        "step": step, "group_id": group_id, "index": index, "ordinal": group_id,
        "generator": "generator-0", "prompt": f"prompt {group_id}", "answer": "42",
        "text": f"completion {index}", "score": float(index % 2), "verdict": "scored", "detail": "",
        "finish_reason": "stop", "num_tokens": 2,
        "version_spans": spans(step, 1, 2),
        "mean_behaviour_logprob": -0.5, "advantage": 1.0 if index % 2 else -1.0, "fate": "trained",
    } | values  # fmt: skip


def make_run(folder: Path, *, steps: int = 4, groups: int = 2, size: int = 2) -> Path:
    """A run that ended well: `steps` steps of `groups` groups of `size` rollouts, without a trace."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG.format(groups=groups, size=size, steps=steps))
    (folder / "run.json").write_text(json.dumps({"run_id": "abc", "commit": "0" * 40, "seed": 7}))
    write_lines(folder / "metrics.jsonl", map(step_record, range(steps)))
    write_lines(
        folder / "evals.jsonl",
        (
            {
                "version": version, "mean_score": version / steps, "num_samples": 8,
                "num_unscored": 0, "mean_tokens": 2.0, "seconds": 0.5, "num_prompts": 4, "time_s": 1.0,
            }
            for version in (0, steps)
        ),
    )  # fmt: skip
    write_lines(
        folder / "rollouts.jsonl",
        (
            rollout_record(step, step * groups + group, index)
            for step in range(steps)
            for group in range(groups)
            for index in range(size)
        ),
    )
    write_lines(folder / "drops.jsonl", [])
    (folder / "summary.json").write_text(json.dumps({"steps": steps, "outcome": "done"}))
    return folder


def long_rollouts(folder: Path, *, steps: int, groups: int, size: int, num_tokens: int) -> None:
    """Replace rollouts.jsonl by one of long completions, every eighth group token by token."""
    words = [
        " the",
        " of",
        "ing",
        " number",
        " 4",
        "2",
        "\n",
        " so",
        " we",
        " have",
        "<",
        ">",
        " é",
    ]
    chance = random.Random(0)

    def lines():
        for step in range(steps):
            for group in range(groups):
                for index in range(size):
                    texts = [chance.choice(words) for _ in range(num_tokens)]
                    record = rollout_record(
                        step, step * groups + group, index, text="".join(texts),
                        num_tokens=num_tokens, score=chance.random(), prompt="Compute " * 40,
                        version_spans=spans(step, num_tokens // 2, num_tokens),
                    )  # fmt: skip
                    if group % 8 == 0:
                        mu = [round(-chance.expovariate(1), 4) for _ in texts]
                        pi = [round(value + chance.gauss(0, 0.2), 4) for value in mu]
                        record["tokens"] = {
                            "text": texts, "behaviour_logprobs": mu, "proximal_logprobs": pi,
                            "behaviour_weights": [round(chance.uniform(0, 2), 4) for _ in texts],
                        }  # fmt: skip
                    yield record

    write_lines(folder / "rollouts.jsonl", lines())
