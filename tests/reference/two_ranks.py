"""One of two learner ranks, started by torchrun from tests/unit/test_ranks.py and test_probe.py.

Usage: python -m tests.reference.two_ranks {train|lora|losses|probe|lost} MODEL OUT
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from asyncrl.config import LoraConfig
from asyncrl.errors import PeerLostError
from asyncrl.learner.batch import StepBatch, split_for_ranks
from asyncrl.learner.checkpoint import CheckpointFacts, latest, load_optimizer, save
from asyncrl.learner.gradients import GradientSketch
from asyncrl.learner.model import Policy, shard
from asyncrl.learner.objective import Objective
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.probe import fixed_tokens, sequence_logprobs
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.reference import WithoutAdapter
from asyncrl.learner.step import StepResult
from tests.reference.groups import group, random_groups, rollout
from tests.reference.stepping import (
    aggregation,
    algorithm,
    load_policy,
    make_optimizer,
    micro_batches,
    pack,
    replace_micro_batches,
    run_step,
)

FACTS = CheckpointFacts(version=3, epoch=1, cursor=7, lineage="d", run_name="r")


def steps() -> list[StepBatch]:
    """Two clean steps of an odd number of micro-batches around one whose last is poisoned, and one
    in which a second rank has nothing to do."""
    groups = random_groups(np.random.default_rng(3), num_groups=5, group_size=3, vocab=90)
    clean = pack(groups, micro_batch_tokens=40)
    first, second, *rest = micro_batches(clean)
    assert len(rest) % 2 == 1
    broken = np.full_like(second.advantages, np.nan)
    # Micro-batch 1 is rank 1's alone.
    poisoned = replace_micro_batches(clean, [first, replace(second, advantages=broken), *rest])
    small = pack([group([4], [rollout([5, 6], score=0.0), rollout([7], score=1.0)])])
    assert len(micro_batches(small)) == 1
    return [clean, poisoned, small]


def load(mode: str, path: Path, checkpoint: Path | None = None) -> Policy:
    """The policy to train: a whole model, or an adapter whose rank no two ranks can share evenly."""
    if mode == "train":
        return load_policy(checkpoint or path)
    policy = load_policy(path)
    policy.adapt(LoraConfig(rank=3, alpha=6.0), seed=4, path=str(path))
    if checkpoint is not None:
        policy.adapter.load(checkpoint)
        return policy
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.named_weights():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def decaying(policy: Policy) -> Optimizer:
    return make_optimizer(policy, weight_decay=0.1, max_grad_norm=0.5)


def train(policy: Policy, optimizer: Optimizer, ranks: Ranks) -> list[StepResult]:
    shares = [split_for_ranks(step, ranks.rank, ranks.world) for step in steps()]
    more = {"sketch": GradientSketch(optimizer.parameters.values())}
    if policy.adapter is not None:
        section = algorithm(kl={"kind": "loss_k2", "coefficient": 0.5})
        more |= {"objective": Objective.of(section), "reference": WithoutAdapter(policy)}
    return [run_step(policy, optimizer, share, ranks=ranks, **more) for share in shares]


GSPO = {"clip_low": 0.1, "clip_high": 0.1}
CASES = {
    "clipped token_mean": (algorithm(), {}),
    "gspo sequence_mean": (algorithm("gspo", loss=GSPO, proximal="interpolated"), {}),
    "reinforce constant_length": (algorithm("reinforce", entropy_bonus=0.1), {}),
    "clipped prompt_mean, 2 updates": (
        algorithm(num_minibatches=2, proximal="recomputed"),
        {"num_minibatches": 2},
    ),
}
"""Sections `algorithm`, and what pack is told beside them; the name ends with the aggregation."""


def moments(model: Path, case: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Adam's first moments after one step from the given weights; the same on every rank."""
    section, settings = CASES[case]
    policy = load_policy(model)
    if ranks.mesh is not None:
        shard(policy, ranks.mesh)
    optimizer = make_optimizer(policy)
    groups = random_groups(
        np.random.default_rng(8), num_groups=5, group_size=3, vocab=90, version=6, max_staleness=2
    )
    name = case.split()[1].rstrip(",")
    step = pack(
        groups, version=6, max_staleness=2, micro_batch_tokens=40, aggregation=aggregation(name),
        **settings,
    )  # fmt: skip
    share = split_for_ranks(step, ranks.rank, ranks.world)
    result = run_step(policy, optimizer, share, objective=Objective.of(section), ranks=ranks)
    assert result.values["optimizer/updates"] == section.num_minibatches
    found = {}
    for key, parameter in optimizer.parameters.items():
        moment = optimizer.adam.state[parameter]["exp_avg"]
        found[key] = moment.full_tensor() if isinstance(moment, DTensor) else moment
    return found


def probe(model: Path, out: Path, ranks: Ranks) -> None:
    """Log-probs of a fixed sequence before and after three steps, one of them before each update."""
    tokens = fixed_tokens(100, seed=0, num_tokens=64)
    policy = load_policy(model)
    shard(policy, ranks.mesh)
    found = {"before": sequence_logprobs(policy, tokens)}
    optimizer = decaying(policy)
    for step in steps():
        sequence_logprobs(policy, tokens)
        run_step(policy, optimizer, split_for_ranks(step, ranks.rank, ranks.world), ranks=ranks)
    found["after"] = sequence_logprobs(policy, tokens)
    assert all(isinstance(value, DTensor) for _, value in policy.named_weights())
    save(out / "saved", FACTS, policy, optimizer, tokenizer=NoTokenizer(), num_kept=1, ranks=ranks)
    save_file(found, out / f"probes{ranks.rank}")


class NoTokenizer:
    def save_pretrained(self, save_directory: str) -> None:
        pass


def main() -> None:
    mode, model, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    rank = int(os.environ["RANK"])
    ranks = Ranks.join(rank=rank, world=2, device_type="cpu", timeout_s=30.0)
    if mode == "lost":
        if rank == 1:
            return
        try:
            ranks.broadcast_bytes(b"batch")
            ranks.barrier()
        except PeerLostError as error:
            (out / "lost.txt").write_text(str(error))
        return
    if mode == "losses":
        for index, case in enumerate(CASES):
            save_file(moments(model, case, ranks), out / f"moments{index}-{rank}")
        ranks.leave()
        return
    if mode == "probe":
        probe(model, out, ranks)
        ranks.leave()
        return
    (out / f"bytes{rank}").write_bytes(ranks.broadcast_bytes(b"\x00batch" if rank == 0 else None))
    policy = load(mode, model)
    shard(policy, ranks.mesh)
    optimizer = decaying(policy)
    results = train(policy, optimizer, ranks)
    summary = [
        {"skipped": r.skipped, "sums": r.sums, "values": r.values, "measured": r.num_measured}
        for r in results
    ]
    (out / f"results{rank}.json").write_text(json.dumps(summary))
    save(out / "saved", FACTS, policy, optimizer, tokenizer=NoTokenizer(), num_kept=1, ranks=ranks)
    found = latest(out / "saved")
    again = load(mode, model, found.path)
    shard(again, ranks.mesh)
    restored = decaying(again)
    load_optimizer(found, restored)
    save(out / "resaved", FACTS, again, restored, tokenizer=NoTokenizer(), num_kept=1, ranks=ranks)
    ranks.leave()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as asyncrl.cli: a thread of gloo may make the ordinary end an abort
