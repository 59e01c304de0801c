"""The configuration: one tree, dotted overrides, errors that name the key."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import RunConfig, read_config, to_toml
from asyncrl.errors import ConfigError
from asyncrl.weights.manifest import MAX_CHUNK_BYTES

MINIMAL = """
[model]
path = "some/model"
[task]
kind = "reverse_digits"
num_digits = 5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_overrides_apply_left_to_right_and_fall_back_to_text(file: Path) -> None:
    config = read_config(file, ["seed=1", "seed=2", "name=abc", "model.path=org/name"])
    assert (config.seed, config.name, config.model.path) == (2, "abc", "org/name")


def test_setting_kind_to_another_variant_resets_the_section(file: Path) -> None:
    config = read_config(file, ["task.kind=products"])
    assert config.task.kind == "products"
    assert config.task.num_digits == 1  # the default of products, not the 5 of reverse_digits


def test_setting_kind_to_the_same_variant_keeps_the_section(file: Path) -> None:
    assert read_config(file, ["task.kind=reverse_digits"]).task.num_digits == 5


def test_an_engine_without_kind_is_the_embedded_one_and_vllm_has_settings_of_its_own(
    file: Path,
) -> None:
    file.write_text(MINIMAL + "[engine]\nmax_prompt_tokens = 7\ndevice = 'cpu'\n")
    assert read_config(file).engine.kind == "hf"
    same = read_config(file, ["engine.kind=hf"]).engine
    assert (same.kind, same.max_prompt_tokens) == ("hf", 7)
    other = read_config(file, ["engine.kind=vllm", "engine.cache_policy=recompute"]).engine
    assert (other.kind, other.max_prompt_tokens, other.cache_policy) == ("vllm", 512, "recompute")
    with pytest.raises(
        ConfigError,
        match=r"engine\.device: unknown key for engine\.kind='vllm', but one of another kind",
    ):
        read_config(file, ["engine.kind=vllm", "engine.device=cpu"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pipelines.num_steps=3", "did you mean pipeline"),
        ("pipeline.num_step=3", "did you mean pipeline.num_steps"),
        ("task.num_digit=3", "did you mean task.num_digits"),
        ("learning_rate=1e-3", "did you mean optimizer.learning_rate?"),
        ("max_prompt_tokens=9", "did you mean engine.max_prompt_tokens?"),  # of several kinds
        ("optimizer.lr=3", "did you mean optimizer.learning_rate"),
        ("algorithm.loss.cliplow=3", "did you mean algorithm.loss.clip_low"),
        ("model.path.x=3", "path is a value, not a section"),
        ("seed", "section.key=value"),
        ("pipeline.max_staleness=-1", "pipeline.max_staleness"),  # F023
        ("pipeline.max_staleness=1.5", "pipeline.max_staleness"),
        ("pipeline.group_size=1", "pipeline.group_size=1"),
        ("algorithm.overlong_buffer_tokens=33", "engine.max_completion_tokens=32"),
        ("algorithm.num_minibatches=9", "pipeline.groups_per_step=8"),
        ("algorithm.loss.anchor=behaviour", "unknown key for algorithm.loss.kind='clipped'"),
        ("pipeline.group_size=128", "engine.max_concurrent_completions=64"),
        ("eval.samples_per_prompt=128", "engine.max_concurrent_completions=64"),
        ("sampling.top_k=5", "sampling.top_k=5"),  # F014
        ("sampling.top_p=0.8", "sampling.top_p=0.8"),
        ("broker.address=tcp://10.0.0.1:5000", "broker.token_path"),
        ("task.kind=nothing", "nothing"),
        ("lora.rank=8", 'lora.serving="pinned"'),
        ("lora.rank=513", "lora.rank"),
        ("lora.dropout=0.1", "lora.dropout: unknown key"),
        ('lora.target_modules=["q proj"]', "lora.target_modules"),
        ("engine.kind=vlm", "'hf', 'vllm'"),
        ("engine.max_prompt_token=3", "did you mean engine.max_prompt_tokens"),
        ("engine.cache_policy=keep", "engine.cache_policy: unknown key for engine.kind='hf', but"),
        ("engine.engines_per_gpu=2", "engine.engines_per_gpu: unknown key for engine.kind='hf'"),
    ],
)
def test_a_bad_override_is_named(file: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(file, [override])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "pipeline.max_stalness=2",
        "pipelines.num_steps=3",  # the section is unknown
        "pipeline.max_staleness=-1",
        "task.kind=nothing",
        "task={kind='products', num_digit=3}",  # a key inside what it sets
        'lora.target_modules=["q proj"]',
    ],
)
def test_what_only_an_override_says_is_not_blamed_on_the_file(file: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(file, ["seed=1", override, "name=abc"])
    assert str(caught.value).startswith(f"override {override!r}: ")
    assert str(file) not in str(caught.value)


def test_the_file_and_each_override_are_named_with_their_own_faults(file: Path) -> None:
    file.write_text(MINIMAL + "num_digit = 3\n[pipeline]\nmax_stale = 1\n")
    with pytest.raises(ConfigError) as caught:
        read_config(file, ["pipeline.num_steps=-1", "seeds=3", "pipeline.num_steps=-2"])
    said = str(caught.value)
    in_file = (
        f"{file}: task.num_digit: unknown key; did you mean task.num_digits?; pipeline.max_stale: "
    )
    assert in_file in said
    assert "override 'seeds=3': seeds: unknown key" in said
    assert "override 'pipeline.num_steps=-2': pipeline.num_steps: " in said  # the one that counts
    assert "num_steps=-1" not in said


def test_values_that_do_not_go_together_are_told_of_the_file(file: Path) -> None:
    file.write_text(MINIMAL + "[algorithm]\nnum_minibatches = 2\nproximal = 'current'\n")
    with pytest.raises(ConfigError, match="num_minibatches=2") as caught:
        read_config(file, ["algorithm.loss.kind=clipped"])
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize("value", ["0", "9", "true", "2.0", "many"])
def test_a_number_of_engines_out_of_range_is_named_in_one_sentence(file: Path, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(file, ["engine.kind=vllm", f"engine.engines_per_gpu={value}"])
    shown = {"true": "True", "many": "'many'"}.get(value, value)
    assert str(caught.value).endswith(
        f'engine.engines_per_gpu: expected 1 to 8, or "auto", got {shown}'
    )


@pytest.mark.parametrize(("value", "engines"), [("1", 1), ("8", 8), ("auto", 1)])
def test_generators_are_places_times_engines_and_auto_counts_as_one_until_it_is_measured(
    file: Path, value: str, engines: int
) -> None:
    settings = ["engine.kind=vllm", f"engine.engines_per_gpu={value}", "pipeline.num_generators=3"]
    config = read_config(file, settings)
    assert (config.engines_per_place, config.num_engines) == (engines, 3 * engines)
    assert config.must_probe == (value == "auto")
    file.write_text(to_toml(config))
    assert read_config(file) == config


def test_auto_is_for_runs_of_one_host(file: Path) -> None:
    hosts = ["broker.address=tcp://10.0.0.1:5000", "broker.token_path=k", "weights.host=10.0.0.1"]
    read_config(file, [*hosts, "engine.kind=vllm", "engine.engines_per_gpu=2"])
    with pytest.raises(ConfigError, match=r'engines_per_gpu="auto" .* `asyncrl probe`'):
        read_config(file, [*hosts, "engine.kind=vllm", "engine.engines_per_gpu=auto"])


def test_a_missing_file_and_broken_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read_config(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML.*line 1"):
        read_config(broken)


@given(
    seed=st.integers(0, 2**62),
    k=st.integers(0, 64),
    rate=st.floats(1e-9, 1.0),
    text=st.text(max_size=20),
)
def test_printed_config_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, seed: int, k: int, rate: float, text: str
) -> None:
    config = RunConfig.model_validate(
        {
            "seed": seed,
            "model": {"path": text},
            "task": {"kind": "reasoning_gym", "dataset": text, "params": {"a b": 1, "c": True}},
            "pipeline": {"max_staleness": k},
            "optimizer": {"learning_rate": rate},
            "lora": {"rank": 4, "serving": "merged", "target_modules": ["q_proj", "0.o_proj"]},
        }
    )
    path = tmp_path_factory.mktemp("toml") / "printed.toml"
    path.write_text(to_toml(config))
    assert read_config(path) == config


def test_digest_changes_with_what_processes_must_agree_on_and_only_with_that(file: Path) -> None:
    base = read_config(file).digest
    assert read_config(file, ["pipeline.max_staleness=7"]).digest != base
    assert read_config(file, ["run_dir=elsewhere"]).digest == base
    assert read_config(file, ["telemetry.trace=false"]).digest == base


def test_an_adapter_is_part_of_a_runs_lineage_and_how_it_is_served_is_not(file: Path) -> None:
    whole = read_config(file)
    assert whole.lora.rank == 0
    adapter = ["lora.serving=merged", "lora.rank=8"]
    base = read_config(file, adapter)
    assert base.lineage != whole.lineage
    for change in ("lora.rank=4", "lora.alpha=16", 'lora.target_modules=["q_proj"]'):
        other = read_config(file, [*adapter, change])
        assert other.lineage != base.lineage
        assert other.digest != base.digest
    served = read_config(file, ["engine.kind=vllm", "lora.rank=8"])
    assert served.lora.serving == "pinned"
    assert served.lineage == base.lineage
    assert served.digest != base.digest
    # Without an adapter its settings mean nothing.
    assert read_config(file, ["lora.alpha=16"]).lineage == whole.lineage


def test_weights_of_a_run_on_several_hosts_are_not_looked_for_on_loopback(file: Path) -> None:
    overrides = ["broker.address=tcp://10.0.0.1:5555", "broker.token_path=key"]
    with pytest.raises(ConfigError, match=r"weights\.host='127.0.0.1'"):
        read_config(file, overrides)
    assert read_config(file, [*overrides, "weights.host=10.0.0.2"]).weights.host == "10.0.0.2"


def test_a_chunk_that_no_manifest_allows_is_refused_before_anything_starts(file: Path) -> None:
    assert read_config(file, [f"weights.chunk_bytes={MAX_CHUNK_BYTES}"])
    with pytest.raises(ConfigError, match=r"weights\.chunk_bytes"):
        read_config(file, [f"weights.chunk_bytes={MAX_CHUNK_BYTES + 1}"])


def test_raw_scores_need_no_group_but_every_one(file: Path) -> None:
    assert read_config(file, ["algorithm.advantage=raw", "pipeline.group_size=1"])
    with pytest.raises(ConfigError, match="zero_signal"):
        read_config(file, ["algorithm.advantage=raw", "pipeline.zero_signal=drop"])
    with pytest.raises(ConfigError, match="max_rl"):
        read_config(file, ["algorithm.advantage=max_rl", "algorithm.overlong_buffer_tokens=4"])


def test_temperatures_that_vllm_would_raise_are_refused_before_anything_starts(file: Path) -> None:
    for name in ("sampling", "eval.sampling"):
        with pytest.raises(ConfigError, match=rf"{name}.temperature=0.001.*top_k=1"):
            read_config(file, ["engine.kind=vllm", f"{name}.temperature=0.001"])
        assert read_config(file, ["engine.kind=hf", f"{name}.temperature=0.001"]) is not None
