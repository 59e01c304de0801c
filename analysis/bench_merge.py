"""What summing an adapter and the base weights takes, and the copy into the parameters after it.

    python analysis/bench_merge.py --shape 1.4b --out DIR

| value       | meaning: medians over rounds                                                       |
|-------------|------------------------------------------------------------------------------------|
| launched_ms | of the host: the offer is checked and every sum is under way                       |
| done_ms     | until the device has made them                                                     |
| copy_ms     | one device copy of all of them into the parameters, after that                     |
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from analysis.random_models import SHAPES, make_model
from asyncrl.config import LoraConfig
from asyncrl.generator.merge import AdapterOffer, MergeBase
from asyncrl.generator.model_facts import describe_model
from asyncrl.telemetry.provenance import provenance


def main() -> None:
    """Measure and write DIR/merge_SHAPE.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.4b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    path = options.out / "models" / options.shape
    make_model(path, options.shape)
    rows = measure(str(path), options.rank, options.rounds)
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    record = provenance() | {"options": {k: str(v) for k, v in vars(options).items()}} | medians
    (options.out / f"merge_{options.shape}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(medians))


@torch.no_grad()
def measure(path: str, rank: int, rounds: int) -> list[dict[str, float]]:
    """Of every round but the first, in which kernels are compiled."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = describe_model(path)
    draw = torch.Generator(device).manual_seed(0)

    def random(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=draw, device=device, dtype=torch.bfloat16)

    offer = AdapterOffer(facts.state, facts.linear, LoraConfig(rank=rank))
    state = {name: random(like) for name, like in facts.state.items()}
    base = MergeBase(state, offer, device)
    offered = {name: random(like) for name, like in offer.zeros().items()}
    rows = []
    for _ in range(rounds + 1):
        began_s = now(device)
        offer.check(offered.items())
        merged = dict(base.merged(offered))
        launched_s = time.perf_counter()
        done_s = now(device)
        torch._foreach_copy_([state[name] for name in merged], list(merged.values()))
        copied_s = now(device)
        rows.append(
            {
                "launched_ms": 1e3 * (launched_s - began_s),
                "done_ms": 1e3 * (done_s - began_s),
                "copy_ms": 1e3 * (copied_s - done_s),
            }
        )
        del merged
    return rows[1:]


def now(device: torch.device) -> float:
    """The time when the device has nothing left to do, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
