"""Which cores and GPUs each local process gets.

A place is what one engine needs: a GPU, or engine.tensor_parallel_size of them. It has
engine.engines_per_gpu engines, which are generators of their own; generator i is at place
i // engines_per_gpu.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import RunConfig, VllmEngineConfig
from asyncrl.errors import ConfigError
from asyncrl.telemetry.bottleneck import Split


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Which cores and GPUs each local process may use; GPUs None leaves the choice to the process."""

    broker: list[int]
    learner: list[int]
    generators: list[list[int]]
    """Of every generator, as `generator_gpus`: the engines of a place stand together."""

    learner_gpus: list[str] | None
    generator_gpus: list[list[str] | None]


def plan_cores(config: RunConfig, cores: list[int], *, gpus: list[str]) -> CorePlan:
    """Split a host between learner and generators.

    On the CPU, where threads of two processes on one core cost up to 20x, learner and generators get
    disjoint cores: half for the learner, the other half shared out among the generators (one core
    each at least; with fewer cores than processes they overlap). With GPUs the learner's ranks take
    the first ones, places the rest in turn, and all share the last one if none is left.

    Raises:
        ConfigError: fewer GPUs are visible than learner.num_ranks or engine.tensor_parallel_size need.
    """
    if 0 < len(gpus) < config.learner.num_ranks and config.learner.device != "cpu":
        raise ConfigError(
            f"learner.num_ranks={config.learner.num_ranks}, but only {len(gpus)} GPUs are visible "
            f"({', '.join(gpus)}); every rank needs its own"
        )
    learner_gpus: list[str] | None = None
    places: list[list[str] | None] = [None] * config.pipeline.num_generators
    if len(gpus) > 1:
        learner_gpus = gpus[: config.learner.num_ranks]
        groups = _places(config, gpus[len(learner_gpus) :] or gpus[-1:])
        places = [groups[i % len(groups)] for i in range(len(places))]
    generator_gpus = [gpus for gpus in places for _ in range(config.engines_per_place)]
    num_generators = config.num_engines
    if not config.host.pin_cores or len(cores) < 2:
        return CorePlan(cores, cores, [cores] * num_generators, learner_gpus, generator_gpus)
    half = len(cores) // 2
    shared = cores[:half]
    each = max(1, half // num_generators)
    starts = [(i * each) % half for i in range(num_generators)]
    generators = [shared[start : start + each] for start in starts]
    return CorePlan(cores, cores[half:], generators, learner_gpus, generator_gpus)


def _places(config: RunConfig, gpus: list[str]) -> list[list[str] | None]:
    """The GPUs that learners leave, in groups that one engine is cut over; a rest stays idle."""
    engine = config.engine
    size = engine.tensor_parallel_size if isinstance(engine, VllmEngineConfig) else 1
    if size > len(gpus):
        raise ConfigError(
            f"engine.tensor_parallel_size={size}, but learner.num_ranks={config.learner.num_ranks} "
            f"leaves {len(gpus)} of the visible GPUs to the generators ({', '.join(gpus)})"
        )
    return [gpus[i : i + size] for i in range(0, len(gpus) - size + 1, size)]


def cores_of_a_place(config: RunConfig, num_cores: int) -> int:
    """How many of this host's cores the engines of one place have to themselves, about."""
    return max(1, num_cores // 2 // config.pipeline.num_generators)


def gpu_split(plan: CorePlan) -> Split | None:
    """GPUs of each side; None if one serves both, or there is none to be moved from one to the other."""
    learner = set(plan.learner_gpus or ())
    generators = {gpu for gpus in plan.generator_gpus for gpu in gpus or ()}
    if learner & generators or not learner or not generators or len(learner | generators) < 3:
        return None
    return Split(learner=len(learner), generators=len(generators))


def visible_gpus() -> list[str]:
    """NVIDIA devices that this process may use, by the names that CUDA_VISIBLE_DEVICES takes.

    Where it is set its own entries are the names: its "2,3" means that 0 and 1 are somebody else's.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [part.strip() for part in visible.split(",") if part.strip()]
    numbers = [path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted((number for number in numbers if number.isdigit()), key=int)
