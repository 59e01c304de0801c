"""Which cores and GPUs each local process gets."""

import os
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import RunConfig


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Which cores and GPUs each local process may use; GPUs None leaves the choice to the process."""

    broker: list[int]
    learner: list[int]
    generators: list[list[int]]
    learner_gpus: list[int] | None
    generator_gpus: list[list[int] | None]


def plan_cores(config: RunConfig, cores: list[int], *, num_gpus: int) -> CorePlan:
    """Split a host between learner and generators.

    On the CPU, where threads of two processes on one core cost up to 20x, learner and generators get
    disjoint cores: half for the learner, the other half shared out among the generators (one core
    each at least; with fewer cores than processes they overlap). With GPUs the learner's ranks take
    the first ones, generators the rest in turn, and all share the last one if none is left.
    """
    num_generators = config.pipeline.num_generators
    learner_gpus: list[int] | None = None
    generator_gpus: list[list[int] | None] = [None] * num_generators
    if num_gpus > 1:
        learner_gpus = list(range(min(config.learner.num_ranks, num_gpus)))
        rest = list(range(len(learner_gpus), num_gpus)) or [num_gpus - 1]
        generator_gpus = [[rest[i % len(rest)]] for i in range(num_generators)]
    if not config.host.pin_cores or len(cores) < 2:
        return CorePlan(cores, cores, [cores] * num_generators, learner_gpus, generator_gpus)
    half = len(cores) // 2
    shared = cores[:half]
    each = max(1, half // num_generators)
    starts = [(i * each) % half for i in range(num_generators)]
    generators = [shared[start : start + each] for start in starts]
    return CorePlan(cores, cores[half:], generators, learner_gpus, generator_gpus)


def count_gpus() -> int:
    """NVIDIA devices of this host that CUDA_VISIBLE_DEVICES does not hide."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip()])
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
