"""How a host is split."""

from asyncrl.config import RunConfig
from asyncrl.placement import plan_cores


def config(**pipeline: int) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "task": {"kind": "repeat_letter"}, "pipeline": pipeline}
    )


def test_two_cores_are_one_for_the_generator_and_one_for_the_learner() -> None:
    plan = plan_cores(config(), [3, 5], num_gpus=0)
    assert (plan.generators, plan.learner) == ([[3]], [5])


def test_generators_share_their_half_without_overlap() -> None:
    plan = plan_cores(config(num_generators=2), list(range(8)), num_gpus=0)
    assert plan.generators == [[0, 1], [2, 3]]
    assert plan.learner == [4, 5, 6, 7]


def test_more_generators_than_cores_each_get_one() -> None:
    plan = plan_cores(config(num_generators=3), [0, 1], num_gpus=0)
    assert plan.generators == [[0], [0], [0]]


def test_the_learner_gets_the_first_gpus_and_generators_the_rest() -> None:
    plan = plan_cores(config(num_generators=3), list(range(4)), num_gpus=3)
    assert plan.learner_gpus == [0]
    assert plan.generator_gpus == [[1], [2], [1]]


def test_one_gpu_is_shared_by_all() -> None:
    plan = plan_cores(config(), list(range(4)), num_gpus=1)
    assert plan.learner_gpus is None
    assert plan.generator_gpus == [None]
