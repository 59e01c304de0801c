"""Bias and variance of each off-policy correction as staleness grows, exactly, on a policy that can be
enumerated.

    python analysis/correction_study.py [--out analysis/results/correction_study.json]

The policy is a table: the next of V tokens given the last one, T tokens a sequence, so that all V^T
sequences can be summed over and nothing is estimated. mu is the policy as it was k steps of gradient
ascent ago (AdamW, like the trainer), pi the policy now: real drift, no noise. With the advantage A(x) =
R(x) - E_mu R and the loss and correction of the trainer itself,

    g(x) = - d loss(x) / d logits        what one sampled sequence contributes
    bias = |E_mu g - g*| / |g*|          g* = E_pi A grad log pi, the gradient that is wanted
    sd   = sqrt(E_mu |g - E_mu g|^2) / |g*|
    rmse = sqrt(bias^2 + sd^2 / 64)      relative error of a step of 64 sequences

averaged over random rewards and initial policies. Seconds on one core.
"""

import argparse
import itertools
import json
import math
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.algo import LOSSES, Loss, TokenBatch
from asyncrl.algo.corrections import correct
from asyncrl.algo.diagnostics import describe, tabulate
from asyncrl.config.algorithm import BehaviourClippedLoss, ClippedLoss
from asyncrl.config.correction import CORRECTIONS
from asyncrl.telemetry.provenance import provenance

VOCABULARY, LENGTH = 4, 6
STALENESS = (0, 1, 2, 4, 8, 16)
LEARNING_RATE = 0.05
NUM_SEEDS = 16
NUM_SEQUENCES = 64

CLIPPED = partial(LOSSES["clipped"], **ClippedLoss().model_dump(exclude={"kind"}))
ANCHORED = partial(
    LOSSES["behaviour_clipped"], **BehaviourClippedLoss().model_dump(exclude={"kind"})
)
METHODS: dict[str, tuple[Loss, dict[str, Any]]] = {
    "none": (CLIPPED, CORRECTIONS["none"]),
    "token TIS, C = 1.5": (CLIPPED, {"weight": "token", "cap": 1.5}),
    "token TIS, C = 2": (CLIPPED, CORRECTIONS["token_tis"]),
    "token TIS, C = 5": (CLIPPED, {"weight": "token", "cap": 5.0}),
    "token IS, no cap": (CLIPPED, {"weight": "token"}),
    "token TIS [0.5, 5]": (CLIPPED, CORRECTIONS["token_tis_two_sided"]),
    "IcePop [0.5, 5]": (CLIPPED, CORRECTIONS["icepop"]),
    "sequence TIS, C = 2": (CLIPPED, CORRECTIONS["sequence_tis"]),
    "sequence TIS, C = 10": (CLIPPED, {"weight": "sequence", "cap": 10.0}),
    "sequence IS, no cap": (CLIPPED, {"weight": "sequence"}),
    "geometric [0.99, 1.01] + TIS": (CLIPPED, CORRECTIONS["geometric"]),
    "k3 < 0.01 + TIS": (CLIPPED, CORRECTIONS["k3"]),
    "behaviour anchor": (ANCHORED, CORRECTIONS["none"]),
}


@dataclass(frozen=True)
class World:
    """All sequences [S, T], what stands before each token, and the reward of each sequence."""

    tokens: Tensor
    before: Tensor
    rewards: Tensor

    @classmethod
    def random(cls, generator: torch.Generator) -> "World":
        """Every token is worth something at its place, and one pair of neighbours is worth more."""
        tokens = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
        before = torch.cat([torch.full((len(tokens), 1), VOCABULARY), tokens[:, :-1]], dim=1)
        worth = torch.rand(LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
        rewards = worth[torch.arange(LENGTH), tokens].mean(1)
        first, second = torch.randint(0, VOCABULARY, (2,), generator=generator).tolist()
        pairs = (tokens[:, :-1] == first) & (tokens[:, 1:] == second)
        return cls(tokens, before, rewards + pairs.any(1).double())

    def logprobs(self, logits: Tensor) -> Tensor:
        """[S, T] log-prob of every token under the table [V + 1, V]."""
        return logits.log_softmax(1)[self.before, self.tokens]

    def gradients(self, logits: Tensor, slopes: Tensor) -> Tensor:
        """[S, (V + 1) V] sum over each sequence's tokens of slope * d log pi / d logits."""
        scores = torch.nn.functional.one_hot(self.tokens, VOCABULARY).double()
        scores = (scores - logits.softmax(1)[self.before]) * slopes[..., None]
        rows = torch.zeros(len(self.tokens), VOCABULARY + 1, VOCABULARY, dtype=torch.float64)
        return rows.scatter_add_(1, self.before[..., None].expand_as(scores), scores).flatten(1)


def history(world: World, generator: torch.Generator) -> list[Tensor]:
    """The policy's table after 0, 1, ... steps of exact gradient ascent on the expected reward."""
    logits = torch.randn(VOCABULARY + 1, VOCABULARY, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    optimizer = torch.optim.AdamW([logits], lr=LEARNING_RATE, weight_decay=0.0)
    tables = [logits.detach().clone()]
    for _ in range(max(STALENESS)):
        optimizer.zero_grad()
        probabilities = world.logprobs(logits).sum(1).exp()
        (-(probabilities * world.rewards).sum()).backward()
        optimizer.step()
        tables.append(logits.detach().clone())
    return tables


def token_batch(world: World, now: Tensor, sampler: Tensor, advantages: Tensor) -> TokenBatch:
    """Every sequence once, as the learner would see it."""
    current = world.logprobs(now).flatten()
    ones = torch.ones_like(current)
    return TokenBatch(
        logprobs=current.clone().requires_grad_(),
        proximal_logprobs=current,
        behaviour_logprobs=world.logprobs(sampler).flatten(),
        advantages=advantages.repeat_interleave(LENGTH),
        completion_mask=ones.bool(),
        staleness=torch.zeros_like(current, dtype=torch.int32),
        sequence=torch.arange(len(world.tokens)).repeat_interleave(LENGTH),
        behaviour_weights=ones,
        scale=ones,
    )


def measure(
    world: World, now: Tensor, sampler: Tensor, loss: Loss, settings: dict[str, Any]
) -> dict[str, float]:
    """Relative bias, standard deviation and error of one method at one staleness."""
    chance = world.logprobs(sampler).sum(1).exp()
    target = world.logprobs(now).sum(1).exp()
    advantages = world.rewards - chance @ world.rewards
    batch = token_batch(world, now, sampler, advantages)
    batch = batch._replace(behaviour_weights=correct(batch, **settings).weights)
    value, _ = loss(batch, num_tokens=1)
    (slopes,) = torch.autograd.grad(value, batch.logprobs)
    found = world.gradients(now, -slopes.view_as(world.tokens))
    wanted = target @ world.gradients(now, advantages[:, None].expand(-1, LENGTH))
    mean = chance @ found
    size = float(wanted.norm())
    bias = float((mean - wanted).norm()) / size
    deviation = math.sqrt(float(chance @ (found - mean).square().sum(1))) / size
    return {
        "bias": bias,
        "sd": deviation,
        "rmse": math.sqrt(bias**2 + deviation**2 / NUM_SEQUENCES),
        "cosine": float(mean @ wanted / (mean.norm() * size)) if mean.any() else 0.0,
    }


def mismatch(world: World, now: Tensor, sampler: Tensor) -> dict[str, float]:
    """The trainer's own diagnostics of a large sample of mu: how far this staleness is."""
    generator = torch.Generator().manual_seed(0)
    chance = world.logprobs(sampler).sum(1).exp()
    rows = torch.multinomial(chance, 4096, replacement=True, generator=generator)
    drawn = World(world.tokens[rows], world.before[rows], world.rewards[rows])
    batch = token_batch(drawn, now, sampler, drawn.rewards)
    tables, _ = tabulate(batch, batch.behaviour_weights, max_staleness=0)
    described = describe(*(table.numpy() for table in tables))
    names = ("k3", "exp_abs", "ess", "sequence_ess", "ratio_p1", "ratio_p99")
    return {name: described[f"mismatch/{name}"] for name in names}


def study() -> dict[str, Any]:
    """Mean over the seeds of everything, by method and staleness."""
    cells: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in range(NUM_SEEDS):
        generator = torch.Generator().manual_seed(seed)
        world = World.random(generator)
        tables = history(world, generator)
        for k in STALENESS:
            now, sampler = tables[-1], tables[-1 - k]
            cells.setdefault(("mismatch", k), []).append(mismatch(world, now, sampler))
            for name, (loss, settings) in METHODS.items():
                entry = measure(world, now, sampler, loss, settings)
                cells.setdefault((name, k), []).append(entry)
    found: dict[str, Any] = {}
    for (name, _), entries in cells.items():
        for quantity in entries[0]:
            mean = statistics.fmean(entry[quantity] for entry in entries)
            found.setdefault(name, {}).setdefault(quantity, []).append(round(mean, 5))
    return {"mismatch": found.pop("mismatch"), "methods": found}


def main() -> None:
    """Compute, write and print."""
    parser = argparse.ArgumentParser(description="bias and variance of off-policy corrections")
    parser.add_argument("--out", type=Path, default=Path("analysis/results/correction_study.json"))
    options = parser.parse_args()
    settings = {
        "vocabulary": VOCABULARY, "length": LENGTH, "staleness": STALENESS,
        "learning_rate": LEARNING_RATE, "num_seeds": NUM_SEEDS, "num_sequences": NUM_SEQUENCES,
    }  # fmt: skip
    result = provenance() | {"settings": settings} | study()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("staleness".ljust(30), *(f"{k:>7}" for k in STALENESS))
    for name, values in result["mismatch"].items():
        print(f"mismatch {name}".ljust(30), *(f"{v:7.3f}" for v in values))
    for quantity in ("bias", "sd", "rmse", "cosine"):
        print(f"\n{quantity}")
        for name, entry in result["methods"].items():
            print(name.ljust(30), *(f"{v:7.3f}" for v in entry[quantity]))


if __name__ == "__main__":
    main()
