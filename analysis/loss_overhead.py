"""What diagnostics cost: the learner's step with all of them against the same step without any.

    python analysis/loss_overhead.py [--model models/smollm2-135m] [--pairs 8]

Both arms train the same batch with the same policy, in turn and in an order drawn for each pair, so that
whatever else the machine does falls on both. On: mismatch by staleness, quantiles, completion-level
statistics, the gradient's cosine. Off: the objective's own sums alone. `overhead_ratio` is the median
over pairs of on / off in wall-clock time; the goal is 1.03. `cpu_ratio` is the same in this process's
CPU time, which says more on a CPU that others use as well.
"""

import argparse
import json
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.algo import ADVANTAGES, AGGREGATIONS
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.learner.batch import StepBatch, build_step
from asyncrl.learner.gradients import GradientSketch
from asyncrl.learner.model import Policy, choose_dtype
from asyncrl.learner.objective import Objective
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.step import train_step
from asyncrl.telemetry.provenance import provenance
from asyncrl.telemetry.trace import Tracer
from asyncrl.types import Rollout, RolloutGroup, Verdict, VersionSpan

MAX_STALENESS = 4


def batch(options: argparse.Namespace, vocabulary: int) -> StepBatch:
    """A step of random tokens whose staleness is spread over 0..4."""
    generator = np.random.default_rng(0)
    groups = []
    for group_id in range(options.groups):
        rollouts = []
        for member in range(options.group_size):
            version = int(generator.integers(0, MAX_STALENESS + 1))
            tokens = generator.integers(0, vocabulary, options.completion_tokens)
            rollouts.append(
                Rollout(
                    completion_tokens=tokens.astype(np.int32),
                    behaviour_logprobs=-generator.uniform(5, 15, len(tokens)).astype(np.float32),
                    version_spans=(VersionSpan(version, 0, len(tokens)),),
                    finish_reason="length",
                    text="",
                    verdict=Verdict(status="scored", score=float(member % 2)),
                )
            )
        prompt = generator.integers(0, vocabulary, options.prompt_tokens).astype(np.int32)
        groups.append(
            RolloutGroup(
                group_id=group_id,
                ordinal=group_id,
                prompt_tokens=prompt,
                prompt_text="",
                answer="",
                rollouts=tuple(rollouts),
            )
        )
    return build_step(
        groups,
        version=MAX_STALENESS,
        max_staleness=MAX_STALENESS,
        advantage=ADVANTAGES["mean_std"],
        aggregation=partial(AGGREGATIONS["token_mean"], constant=options.completion_tokens),
        num_minibatches=1,
        mask_truncated=False,
        share_prompts=True,
        micro_batch_tokens=options.micro_batch_tokens,
        skip_zero_advantage=True,
    )


class Arms:
    """The same step with and without diagnostics, timed."""

    def __init__(self, policy: Policy, step: StepBatch) -> None:
        self._policy, self._step = policy, step
        self._device = next(policy.parameters()).device
        self._objective = Objective.of(AlgorithmConfig())
        # A rate this small keeps the policy where it is: every step computes the same.
        self._optimizer = Optimizer(
            policy, learning_rate=1e-12, weight_decay=0.0, beta1=0.9, beta2=0.999,
            max_grad_norm=1.0, num_warmup_steps=0,
        )  # fmt: skip
        self._sketch = GradientSketch(self._optimizer.parameters.values())

    def seconds(self, *, diagnose: bool) -> tuple[float, float]:
        """One step, to the end of its last kernel: wall clock, and this process's CPU time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        train_step(
            self._policy,
            self._optimizer,
            self._step,
            objective=self._objective,
            temperature=1.0,
            ranks=Ranks(),
            tracer=Tracer(None, process="overhead"),
            diagnose=diagnose,
            sketch=self._sketch if diagnose else None,
        )
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def measure(arms: Arms, num_pairs: int) -> dict[str, Any]:
    """Pairs of one step each way; the first pair is a warm-up and not counted."""
    order = random.Random(0)
    pairs: list[dict[bool, tuple[float, float]]] = []
    for _ in range(num_pairs + 1):
        pairs.append({on: arms.seconds(diagnose=on) for on in order.sample([True, False], 2)})
    del pairs[0]
    wall = sorted(pair[True][0] / pair[False][0] for pair in pairs)
    return {
        "overhead_ratio": round(statistics.median(wall), 4),
        "ratio_min": round(wall[0], 4),
        "ratio_max": round(wall[-1], 4),
        "cpu_ratio": round(statistics.median(p[True][1] / p[False][1] for p in pairs), 4),
        "on_s": [round(pair[True][0], 5) for pair in pairs],
        "off_s": [round(pair[False][0], 5) for pair in pairs],
    }


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description="learner step time with and without diagnostics")
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--completion-tokens", type=int, default=32)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("analysis/results/loss_overhead.json"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = Policy.load(options.model, device=device, compute_dtype=choose_dtype("auto", device))
    step = batch(options, vocabulary=policy.model.config.vocab_size)
    settings = {
        name: str(value) if name == "out" else value for name, value in vars(options).items()
    }
    result = provenance() | {
        "settings": settings,
        "device": str(device),
        "compute_dtype": str(policy.compute_dtype),
        "num_tokens": step.num_tokens,
        "num_micro_batches": len(step.minibatches[0].micro_batches),
        **measure(Arms(policy, step), options.pairs),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("overhead_ratio", "cpu_ratio")}))


if __name__ == "__main__":
    main()
