"""From a sweep's file to its runs; what is wrong is said before one starts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import read_config
from asyncrl.errors import ConfigError
from asyncrl.sweep.host import blocks, share_cores, share_gpus
from asyncrl.sweep.plan import PlannedRun, plan_runs, shard
from asyncrl.sweep.settings import flat, read_sweep

BASE = """
[model]
path = "some/model"
[task]
kind = "repeat_letter"
[pipeline]
groups_per_step = 4
group_size = 8
num_steps = 10
"""

SWEEP = """
name = "demo"
base = "base.toml"
out = "somewhere"
[set]
pipeline.num_steps = 20
[variants.tis]
[variants.plain.algorithm]
correction.kind = "none"
[grid]
staleness = [
    { pipeline.max_staleness = 0, pipeline.depth = 1 },
    { pipeline.max_staleness = 8, pipeline.depth = 9 },
]
seed = [0, 1, 2]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return tmp_path / "sweep.toml"


def test_a_sweep_is_every_variant_at_every_k_and_seed(file: Path) -> None:
    runs = plan_runs(read_sweep(file))
    cells = {(run.variant, run.k, run.seed) for run in runs}
    assert cells == {(v, k, s) for v in ("tis", "plain") for k in (0, 8) for s in (0, 1, 2)}
    assert len(runs) == 12
    for run in runs:
        config = run.config
        assert config.pipeline.depth == run.k + 1  # the linked key
        assert config.pipeline.num_steps == 20  # [set] wins over the base
        assert (
            config.algorithm.correction.kind == {"tis": "token_tis", "plain": "none"}[run.variant]
        )
        assert config.telemetry.wandb_group == "demo"
        assert run.num_samples == 20 * 4 * 8
        assert run.run_dir == Path("somewhere/runs") / run.name
        assert Path(config.run_dir) == run.run_dir


def test_seeds_are_outermost_so_that_a_part_holds_whole_comparisons(file: Path) -> None:
    runs = plan_runs(read_sweep(file))
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4 + [2] * 4


def test_the_command_of_a_run_gives_its_config(file: Path) -> None:
    for run in plan_runs(read_sweep(file)):
        command, base, *overrides = run.command
        assert command == "run"
        assert read_config(Path(base), overrides) == run.config


def test_keys_of_the_sweep_are_overridden_like_those_of_a_run(file: Path) -> None:
    settings = read_sweep(file, ["num_parallel=3", "grid.seed=[7]", "set.pipeline.num_steps=5"])
    assert settings.num_parallel == 3
    runs = plan_runs(settings)
    assert {run.seed for run in runs} == {7}
    assert {run.num_samples for run in runs} == {5 * 4 * 8}


def test_another_axis_is_part_of_the_variant(file: Path) -> None:
    runs = plan_runs(read_sweep(file, ["grid.optimizer.learning_rate=[1e-3, 1e-4]"]))
    assert len(runs) == 24
    assert {run.variant for run in runs} == {
        f"{name} optimizer.learning_rate={rate}"
        for name in ("tis", "plain")
        for rate in (1e-3, 1e-4)
    }
    assert len({run.name for run in runs}) == 24


def test_a_variant_may_change_a_kind_and_the_axis_wins(file: Path) -> None:
    runs = plan_runs(
        read_sweep(
            file,
            [
                "set.algorithm.loss.kind=behaviour_clipped",
                "set.algorithm.correction.kind=none",
                "variants.plain.algorithm.loss.clip_low=0.1",
                'grid.loss=[{algorithm.loss.kind="clipped"}]',
            ],
        )
    )
    # The kind comes last and resets the section: clip_low was the other loss's.
    losses = [run.config.algorithm.loss for run in runs]
    assert all(loss.kind == "clipped" and loss.clip_low == 0.2 for loss in losses)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grid.seed=[]", "has no values"),
        ("grid.seed=[1, {seed=2}]", "mixes values and tables"),
        ("grid.staleness=[{}]", "staleness has a table without overrides"),
        ("grid.staleness=[{pipeline.depth=2}, {pipeline={}}]", "a table without overrides"),
        ("grid.seed=[1, 1]", "two runs of the sweep are 'tis-k0-s1'"),
        ("grid.telemetry.trace=[true, true]", "two runs of the sweep"),
        ("grid.pipeline.num_steps=[5, 6]", "would train 192 samples and .* 160"),
        ('grid.staleness=[{pipeline.max_staleness=0},'
         '{pipeline.max_staleness=2,eval.num_prompts=9}]', r"\[eval\] of .* differ"),
        ("grid.pipeline.max_stalenes=[1]", "did you mean pipeline.max_staleness"),
        ("num_paralel=2", "num_paralel.*a sweep has: name, base, out, num_parallel"),
        ("num_parallel=0", "num_parallel: .*greater than or equal to 1"),
        ("base=absent.toml", "cannot read the config .*absent.toml"),
        ("keep=[\"everything\"]", "keep.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_or_run_is_refused(file: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_runs(read_sweep(file, [override]))


def test_a_sweep_that_is_no_file_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the sweep"):
        read_sweep(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_sweep(tmp_path / "bad.toml")


@given(num_runs=st.integers(1, 40), count=st.integers(1, 9))
def test_shards_are_disjoint_and_together_the_plan(num_runs: int, count: int) -> None:
    runs: list[PlannedRun] = [object() for _ in range(num_runs)]  # type: ignore[misc]
    parts = [shard(runs, index, count) for index in range(count)]
    together = [run for part in parts for run in part]
    assert len(together) == num_runs
    assert set(map(id, together)) == set(map(id, runs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shard_beyond_the_last_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--shard 4/4.*0 <= I < N"):
        shard([], 4, 4)


@given(num_cores=st.integers(1, 64), count=st.integers(1, 64))
def test_parallel_runs_never_share_a_core(num_cores: int, count: int) -> None:
    cores = list(range(100, 100 + num_cores))
    if count > num_cores:
        with pytest.raises(ConfigError, match=f"num_parallel={count}"):
            share_cores(cores, count)
        return
    parts = share_cores(cores, count)
    assert [core for part in parts for core in part] == cores  # all of them, each once
    assert min(map(len, parts)) == num_cores // count


def test_gpus_are_shared_only_when_there_are_too_few() -> None:
    assert share_gpus(["0", "1", "2", "3"], 2) == [["0", "1"], ["2", "3"]]
    assert share_gpus(["0"], 3) == [["0"]] * 3
    assert share_gpus([], 2) == [[], []]
    assert blocks([1, 2, 3], 2) == [[1], [2, 3]]


def test_tables_and_dotted_keys_are_the_same() -> None:
    nested = {"a": {"b": {"c": 1}, "d.e": 2}, "f": [{"g": 3}]}
    assert flat(nested) == {"a.b.c": 1, "a.d.e": 2, "f": [{"g": 3}]}
