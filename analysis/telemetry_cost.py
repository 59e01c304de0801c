"""What telemetry costs: a step's time with all of it against the same with as little as possible.

    python analysis/telemetry_cost.py [--config FILE] [--pairs 4] [section.key=value ...]

Whole runs in pairs, their order drawn for each pair: whatever else the machine does falls on both.

| arm | telemetry.trace | telemetry.wandb | telemetry.rollouts |
|-----|-----------------|-----------------|--------------------|
| on  | true            | "offline"       | true               |
| off | false           | "off"           | false              |

metrics.jsonl is written by both; it is what is compared. Nothing is learned (learning rate 1e-9), so that
every step of every run does the same work. A run counts with the median of time/step_s after its first
steps and before its last; `step_time_ratio` is the median over pairs of on / off, and the goal is 1.01.
`record_frac` is the part of the learner's time that went into writing records with all of it on: a
measurement within one run, which the noise between runs does not reach. By default the packaged model,
12 steps of seconds each; a toy's steps of 30 ms (launch/smoke.toml) are too short for the goal, since
writing 64 rollouts takes a millisecond or two whatever the model.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from asyncrl.config import read_config
from asyncrl.telemetry.provenance import provenance

ARMS = {
    "on": ["telemetry.trace=true", "telemetry.wandb=offline", "telemetry.rollouts=true"],
    "off": ["telemetry.trace=false", "telemetry.wandb=off", "telemetry.rollouts=false"],
}
STEADY = [
    "optimizer.learning_rate=1e-9", "eval.every_steps=0", "eval.num_prompts=1",
    "checkpoint.every_steps=0", "telemetry.alerts=off", "pipeline.num_steps=12",
]  # fmt: skip


def run(config: Path, overrides: list[str], *, skip: int) -> dict[str, float]:
    """One run's median step in seconds, and the share of its steps' time that recording took."""
    with tempfile.TemporaryDirectory(prefix="telemetry-cost-") as folder:
        run_dir = Path(folder, "run")
        command = [
            sys.executable, "-m", "asyncrl", "run", str(config), *overrides, f'run_dir="{run_dir}"',
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][skip:-1]  # the last one saves a checkpoint
    return {
        "step_s": statistics.median(step["time/step_s"] for step in steps),
        "record_frac": sum(step["time/record_s"] for step in steps)
        / sum(step["time/step_s"] for step in steps),
    }


def measure(options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """All pairs; one run before them warms the disk's caches and is not counted."""
    order = random.Random(0)
    run(options.config, [*overrides, *ARMS["on"]], skip=options.skip)
    pairs: list[dict[str, dict[str, float]]] = []
    for _ in range(options.pairs):
        pair = {}
        for arm in order.sample(["on", "off"], 2):
            pair[arm] = run(options.config, [*overrides, *ARMS[arm]], skip=options.skip)
            print(arm, pair[arm], flush=True)
        pairs.append(pair)
    ratios = sorted(pair["on"]["step_s"] / pair["off"]["step_s"] for pair in pairs)
    return {
        "step_time_ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(ratios[0], 4),
        "ratio_max": round(ratios[-1], 4),
        "record_frac": round(statistics.median(pair["on"]["record_frac"] for pair in pairs), 5),
        "on_s": [round(pair["on"]["step_s"], 5) for pair in pairs],
        "off_s": [round(pair["off"]["step_s"], 5) for pair in pairs],
    }


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description="step time with and without telemetry")
    parser.add_argument("--config", type=Path, default=Path("launch/reverse_digits_cpu.toml"))
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--skip", type=int, default=3, help="first steps of a run left out")
    parser.add_argument("--out", type=Path, default=Path("analysis/results/telemetry_cost.json"))
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    overrides = [*STEADY, *options.overrides]
    config = read_config(options.config, overrides)
    result = provenance() | {
        "config_file": str(options.config),
        "config": config.model_dump(mode="json"),
        "seed": config.seed,
        "pairs": options.pairs,
        **measure(options, overrides),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("step_time_ratio", "record_frac")}))


if __name__ == "__main__":
    main()
