"""How often a sweep's rule claims an effect that is none, and how often it finds one; by simulation.

    python analysis/sweep_rule_study.py [--num 2000] [--out analysis/results/sweep_rule_study.json]

A simulated sweep has six k and n seeds; scores are independent draws of one distribution, so that nothing
differs, unless an effect (in standard deviations of a score) is subtracted at some k. Rules compared:

| rule         | claims                                                                              |
|--------------|-------------------------------------------------------------------------------------|
| percentile   | one k alone: its percentile bootstrap interval of the paired difference excludes 0  |
| simultaneous | any k: bootstrap of max |z| over k, its level carried over to Student's t           |
| bonferroni   | any k: Student's interval at 5 % / 5                                                |
| step_down    | asyncrl/sweep/verdict.py: from the largest k down while the 95 % interval excludes 0 |
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from asyncrl.sweep.intervals import percentile_interval, t_interval
from asyncrl.telemetry.provenance import provenance

KS = 6
SEEDS = (3, 5, 8)
Scores = np.ndarray[Any, np.dtype[np.float64]]
DRAWS: dict[str, Callable[[np.random.Generator, int], Scores]] = {
    "normal": lambda rng, n: rng.normal(size=(n, KS)),
    "uniform": lambda rng, n: rng.uniform(size=(n, KS)),
    "t, 3 degrees": lambda rng, n: rng.standard_t(3, size=(n, KS)),
    "exponential": lambda rng, n: -rng.exponential(size=(n, KS)),
    "near a ceiling": lambda rng, n: np.minimum(1.0, 1.05 - rng.exponential(0.08, size=(n, KS))),
    "spread grows with k": lambda rng, n: rng.normal(size=(n, KS)) * [1, 1, 1, 2, 4, 8],
}


def percentile(scores: Scores, rng: np.random.Generator) -> set[int]:
    """Looks at k = 1 alone."""
    low, high = percentile_interval((scores[:, 1] - scores[:, 0]).tolist(), rng)
    return {1} if low > 0 or high < 0 else set()


def t_claims(scores: Scores, level: float) -> set[int]:
    """Every k by itself at `level`."""
    found = {
        k: t_interval((scores[:, k] - scores[:, 0]).tolist(), level=level) for k in range(1, KS)
    }
    return {k for k, interval in found.items() if interval.low > 0 or interval.high < 0}


def bonferroni(scores: Scores, _rng: np.random.Generator) -> set[int]:
    """Each k at a fifth of 5 %."""
    return t_claims(scores, 1 - 0.05 / (KS - 1))


def simultaneous(scores: Scores, rng: np.random.Generator) -> set[int]:
    """The quantile of max |z| over resamples of seeds gives the level of each comparison."""
    differences = scores[:, 1:] - scores[:, :1]
    n = len(differences)
    means = differences.mean(axis=0)
    errors = differences.std(axis=0) / np.sqrt(n)  # of a resample's mean: no n - 1 here
    drawn = rng.integers(n, size=(2000, n))
    z = np.abs(differences[drawn].mean(axis=1) - means) / np.maximum(errors, 1e-12)
    largest = z.max(axis=1)
    single = 2 * (1 - NormalDist().cdf(float(np.quantile(largest, 0.95))))
    return t_claims(scores, 1 - min(0.05, max(single, 0.05 / (KS - 1))))


def step_down(scores: Scores, _rng: np.random.Generator) -> set[int]:
    """The rule of the verdict."""
    differing = t_claims(scores, 0.95)
    return {k for k in differing if all(upper in differing for upper in range(k, KS))}


Rule = Callable[[Scores, np.random.Generator], set[int]]
RULES: dict[str, Rule] = {f.__name__: f for f in (percentile, simultaneous, bonferroni, step_down)}


def main() -> None:
    """Simulate, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("analysis/results/sweep_rule_study.json"))
    options = parser.parse_args()
    result: dict[str, Any] = provenance() | {"num": options.num, "seed": 0, "found": []}
    rng = np.random.default_rng(0)
    for n in SEEDS:
        for name, rule in RULES.items():
            alarms = {
                draw: sum(bool(rule(d(rng, n), rng)) for _ in range(options.num)) / options.num
                for draw, d in DRAWS.items()
            }
            power = {size: power_of(rule, n, size, rng, options.num // 4) for size in (1, 2, 3, 4)}
            if name == "percentile":
                power = {}  # it looks at another k
            entry = {"seeds": n, "rule": name, "false_alarms": alarms, "power": power}
            result["found"].append(entry)
            print(json.dumps(entry))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def power_of(rule: Rule, num_seeds: int, size: float, rng: np.random.Generator, num: int) -> float:
    """How often the largest k is claimed when the two largest are lower by `size` deviations."""
    shift = size * np.array([0, 0, 0, 0, 1, 1])
    return sum(5 in rule(rng.normal(size=(num_seeds, KS)) - shift, rng) for _ in range(num)) / num


if __name__ == "__main__":
    main()
