"""How a host is split."""

import pytest

from asyncrl.config import LearnerConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.placement import cores_of_a_place, gpu_split, plan_cores, visible_gpus
from asyncrl.telemetry.bottleneck import Split


def config(engine: dict[str, object] | None = None, **pipeline: int) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "task": {"kind": "repeat_letter"}, "pipeline": pipeline}
        | ({"engine": {"kind": "vllm", **engine}} if engine else {})
    )


def test_two_cores_are_one_for_the_generator_and_one_for_the_learner() -> None:
    plan = plan_cores(config(), [3, 5], gpus=[])
    assert (plan.generators, plan.learner) == ([[3]], [5])


def test_generators_share_their_half_without_overlap() -> None:
    plan = plan_cores(config(num_generators=2), list(range(8)), gpus=[])
    assert plan.generators == [[0, 1], [2, 3]]
    assert plan.learner == [4, 5, 6, 7]


def test_more_generators_than_cores_each_get_one() -> None:
    plan = plan_cores(config(num_generators=3), [0, 1], gpus=[])
    assert plan.generators == [[0], [0], [0]]


def test_the_learner_gets_the_first_gpus_and_generators_the_rest() -> None:
    plan = plan_cores(config(num_generators=3), list(range(4)), gpus=["0", "1", "2"])
    assert plan.learner_gpus == ["0"]
    assert plan.generator_gpus == [["1"], ["2"], ["1"]]


def test_gpus_count_for_a_side_only_if_they_serve_no_other() -> None:
    def split(gpus: int, **engine: int) -> Split | None:
        names = [str(i) for i in range(gpus)]
        return gpu_split(plan_cores(config(engine, num_generators=3), [0, 1], gpus=names))

    assert split(8) == Split(learner=1, generators=3)  # four are nobody's
    assert split(8, tensor_parallel_size=2) == Split(learner=1, generators=6)
    assert split(4, engines_per_gpu=2) == Split(learner=1, generators=3)
    assert split(2) is None  # one each: nothing to move
    assert split(1) is None


def test_one_gpu_is_shared_by_all() -> None:
    plan = plan_cores(config(), list(range(4)), gpus=["0"])
    assert plan.learner_gpus is None
    assert plan.generator_gpus == [None]


def test_only_the_gpus_that_a_scheduler_gave_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its "2,GPU-5d" names devices; counting them would take 0 and 1, which are somebody else's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-5d")
    plan = plan_cores(config(), list(range(4)), gpus=visible_gpus())
    assert plan.learner_gpus == ["2"]
    assert plan.generator_gpus == [["GPU-5d"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_more_ranks_than_gpus_are_refused_before_anything_starts() -> None:
    crowded = config().model_copy(update={"learner": LearnerConfig(num_ranks=3)})
    with pytest.raises(ConfigError, match=r"num_ranks=3, but only 2 GPUs"):
        plan_cores(crowded, [0, 1], gpus=["0", "1"])


def test_the_engines_of_a_place_share_its_gpu_and_split_its_cores() -> None:
    crowded = config({"engines_per_gpu": 3}, num_generators=2)
    assert crowded.num_engines == 6
    plan = plan_cores(crowded, list(range(24)), gpus=["0", "1", "2"])
    assert plan.learner_gpus == ["0"]
    assert plan.generator_gpus == [["1"]] * 3 + [["2"]] * 3
    # Half of 24 cores for 6 engines: 2 each.
    assert plan.generators == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert plan.learner == list(range(12, 24))


def test_without_a_second_gpu_the_engines_of_a_place_choose_the_only_one() -> None:
    plan = plan_cores(config({"engines_per_gpu": 4}), list(range(4)), gpus=["0"])
    assert plan.generator_gpus == [None] * 4
    assert plan.generators == [[0], [1], [0], [1]]


def test_an_engine_that_is_cut_over_gpus_gets_as_many_and_a_rest_stays_idle() -> None:
    wide = config({"tensor_parallel_size": 2, "engines_per_gpu": 2}, num_generators=3)
    plan = plan_cores(wide, list(range(4)), gpus=["0", "1", "2", "3", "4", "5"])
    # Of 1 to 5 the pairs (1, 2) and (3, 4); the third place comes round to the first pair.
    assert plan.generator_gpus == [["1", "2"]] * 2 + [["3", "4"]] * 2 + [["1", "2"]] * 2


def test_an_engine_that_is_cut_over_more_gpus_than_are_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2, but .*num_ranks=1 leaves 1 of"):
        plan_cores(config({"tensor_parallel_size": 2}), [0], gpus=["0", "1"])


def test_places_have_half_of_the_cores_between_them_and_one_at_least() -> None:
    assert cores_of_a_place(config(num_generators=2), 16) == 4
    assert cores_of_a_place(config(num_generators=4), 2) == 1
