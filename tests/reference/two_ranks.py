"""One of two learner ranks, started by torchrun from tests/unit/test_ranks.py.

Usage: python -m tests.reference.two_ranks {train|lost} MODEL OUT
"""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from asyncrl.algo import ADVANTAGES, LOSSES
from asyncrl.errors import PeerLostError
from asyncrl.learner.batch import StepBatch, build_step, split_for_ranks
from asyncrl.learner.checkpoint import CheckpointFacts, latest, load_optimizer, save
from asyncrl.learner.model import Policy, shard
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.step import Optimizer, StepResult, train_step
from asyncrl.telemetry.trace import Tracer
from tests.reference.groups import group, random_groups, rollout

LOSS = partial(LOSSES["clipped"], clip_low=0.2, clip_high=0.28, dual_clip=3.0, tis_cap=2.0)
FACTS = CheckpointFacts(version=3, epoch=1, cursor=7, config_digest="d", run_name="r")


def steps() -> list[StepBatch]:
    """Two clean steps of an odd number of micro-batches around one whose last is poisoned, and one
    in which a second rank has nothing to do."""
    groups = random_groups(np.random.default_rng(3), num_groups=5, group_size=3, vocab=90)
    pack = partial(
        build_step,
        version=0,
        max_staleness=0,
        advantage=ADVANTAGES["mean_std"],
        share_prompts=True,
        micro_batch_tokens=40,
        skip_zero_advantage=False,
    )
    clean = pack(groups)
    assert len(clean.micro_batches) % 2 == 1
    first, second, *rest = clean.micro_batches
    broken = np.full_like(second.advantages, np.nan)
    # Micro-batch 1 is rank 1's alone.
    poisoned = replace(clean, micro_batches=(first, replace(second, advantages=broken), *rest))
    small = pack([group([4], [rollout([5, 6], score=0.0), rollout([7], score=1.0)])])
    assert len(small.micro_batches) == 1
    return [clean, poisoned, small]


def make_optimizer(policy: Policy) -> Optimizer:
    return Optimizer(
        policy,
        learning_rate=1e-3,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.999,
        max_grad_norm=0.5,
        num_warmup_steps=0,
    )


def train(policy: Policy, optimizer: Optimizer, ranks: Ranks) -> list[StepResult]:
    return [
        train_step(
            policy,
            optimizer,
            split_for_ranks(step, ranks.rank, ranks.world),
            loss=LOSS,
            temperature=1.0,
            ranks=ranks,
            tracer=Tracer(None, process="test"),
        )
        for step in steps()
    ]


def load(path: Path) -> Policy:
    return Policy.load(path, device=torch.device("cpu"), compute_dtype=torch.float32)


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
    (out / f"bytes{rank}").write_bytes(ranks.broadcast_bytes(b"\x00batch" if rank == 0 else None))
    policy = load(model)
    shard(policy, ranks.mesh)
    optimizer = make_optimizer(policy)
    results = train(policy, optimizer, ranks)
    summary = [
        {"skipped": r.skipped, "sums": r.sums, "values": r.values, "measured": r.num_measured}
        for r in results
    ]
    (out / f"results{rank}.json").write_text(json.dumps(summary))
    save(out / "saved", FACTS, policy, optimizer, tokenizer=NoTokenizer(), num_kept=1, ranks=ranks)
    found = latest(out / "saved")
    again = load(found.path)
    shard(again, ranks.mesh)
    restored = make_optimizer(again)
    load_optimizer(found, restored)
    save(out / "resaved", FACTS, again, restored, tokenizer=NoTokenizer(), num_kept=1, ranks=ranks)
    ranks.leave()


if __name__ == "__main__":
    main()
