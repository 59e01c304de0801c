"""The memory of a GPU among its engines; every expected number is computed beside it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import LoraConfig, VllmEngineConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.memory import (
    NO_LORA,
    PROCESS,
    cache_bytes_per_token,
    divide,
    graph_sizes,
    prefill_tokens,
    staging_bytes,
    weight_bytes,
)
from asyncrl.generator.model_facts import ModelFacts

GIB = 2**30
BF16 = torch.bfloat16


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def model(*, layers: int = 1, hidden: int = 64, wide: int = 256, vocabulary: int = 1000):
    embedding = tensor(vocabulary, hidden)
    state = {"embedding": embedding, "head": embedding, "norm": tensor(hidden)}
    for i in range(layers):
        state |= {f"{i}.up.weight": tensor(wide, hidden), f"{i}.down.weight": tensor(hidden, wide)}
    return ModelFacts(
        state=state,
        linear=tuple(f"{i}.{name}" for i in range(layers) for name in ("up", "down")),
        vocabulary=vocabulary,
        num_positions=8192,
        stop_tokens=(),
        num_layers=layers,
        hidden_size=hidden,
        num_kv_heads=2,
        kv_values_per_token=2 * layers * hidden,
    )


def engine(**changes: object) -> VllmEngineConfig:
    settings = {"max_prompt_tokens": 100, "max_completion_tokens": 20, "engines_per_gpu": 2}
    return VllmEngineConfig.model_validate(settings | changes)


@given(st.integers(1, 3000), st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 3]))
def test_no_part_of_vllms_trial_batches_is_longer_than_the_context(
    completions, prompt, answer, engines
):
    config = VllmEngineConfig(
        max_concurrent_completions=completions, max_prompt_tokens=prompt,
        max_completion_tokens=answer, engines_per_gpu=engines,
    )  # fmt: skip
    sequences, context = completions + 1, prompt + answer
    tokens = prefill_tokens(config, context)
    graphs = graph_sizes(config, context)
    batches = [tokens, *(size for size in graphs if size >= sequences)]
    # vLLM gives every sequence as many, and the last one the rest as well.
    assert all(batch // sequences + batch % sequences <= context for batch in batches)
    budget = 16_384 if engines == 1 else 8192
    # As many as vLLM would take, but for a part of one token for each sequence, and none too many.
    assert min(budget - sequences, sequences * context) <= tokens <= max(budget, sequences)
    assert graphs[0] == 1
    assert graphs[-1] <= min(2048, sequences + 512, tokens)


def test_steps_that_decode_all_and_prefill_a_group_are_in_a_graph() -> None:
    # 128 completions, a scored one, and a group of 8: 64 prompt tokens and 7 times a block of 16.
    config = engine(max_concurrent_completions=128, max_prompt_tokens=64, max_completion_tokens=128)
    sizes = graph_sizes(config, 192)
    assert sizes[-1] == 640  # 129 + 512 = 641
    assert next(size for size in sizes if size >= 129 + 176) == 320
    thousand = engine(max_concurrent_completions=1024, max_prompt_tokens=1000)
    assert next(size for size in graph_sizes(thousand, 1020) if size >= 1025) == 1088
    assert graph_sizes(thousand, 1020)[-1] == 1536


def test_the_share_of_an_engine_is_weights_twice_activations_graphs_process_and_cache() -> None:
    found = divide(engine(gpu_memory_utilization=0.5), model(), BF16, total_bytes=8 * GIB)
    assert found.share == 2 * GIB  # 8 GiB * 0.5 / 2
    # Embedding and head are one: 1000 * 64 + 2 * 256 * 64 + 64 = 96,832 numbers of 2 bytes.
    assert found.weights == found.staging == 193_664
    # A step has at most 65 sequences of 100 + 20 tokens, 7,800 < 8,192: 7,800 * 2 bytes *
    # (4 * 64 + 4 * 256) = 19,968,000; and logits of 65 and of a scored one: 185 * 1000 * 16 = 2,960,000.
    assert found.activations == 22_928_000
    # 2 kinds * 53 sizes (3 + 31 + 16, and 512, 544, 576 <= 65 + 512) * 1 layer * 393,216
    assert found.graphs == 41_680_896
    # 2,147,483,648 - 2 * 193,664 - 22,928,000 - 41,680,896 - 1,610,612,736
    assert found.cache == 471_874_688


def test_eager_engines_have_no_graphs() -> None:
    found = divide(engine(enforce_eager=True), model(), BF16, total_bytes=80 * GIB)
    assert found.graphs == 0


def test_fp8_weights_are_a_byte_but_what_is_published_for_them_is_not() -> None:
    fp8 = engine(quantization="fp8")
    # Embedding and norm keep 2 bytes: 64,064 * 2 + 32,768 * 1.
    assert weight_bytes(fp8, model(), BF16) == 160_896
    assert staging_bytes(fp8, model(), BF16, NO_LORA, 0) == 193_664


def test_merged_adapters_need_room_for_their_base_and_for_the_sum() -> None:
    plain, merged = (
        divide(engine(), model(), BF16, total_bytes=80 * GIB, lora=lora)
        for lora in (LoraConfig(serving="merged"), LoraConfig(rank=8, serving="merged"))
    )
    assert plain.staging == 193_664
    assert merged.staging == 387_328
    assert plain.cache - merged.cache == 193_664


def test_pinned_adapters_need_room_for_every_version_but_for_no_model() -> None:
    found = divide(
        engine(), model(), BF16, total_bytes=80 * GIB, max_staleness=2,
        lora=LoraConfig(rank=20, serving="pinned"),
    )  # fmt: skip
    # Two modules of 256 + 64 rows and columns, 2 bytes: 1,280. Slots have rank 32, one for each of 3
    # versions; these are registered with their own 20, and the next comes in 4 bytes: 3 * 32 + 5 * 20.
    assert found.staging == 250_880
    # Graphs of 53 sizes and 2 kinds (41,680,896, as above), with and without an adapter.
    assert found.graphs == 2 * 41_680_896


def test_engines_that_are_cut_over_two_gpus_hold_half_of_the_weights_on_each() -> None:
    assert weight_bytes(engine(tensor_parallel_size=2), model(), BF16) == 96_832
    one = divide(engine(), model(), BF16, total_bytes=80 * GIB)
    two = divide(engine(tensor_parallel_size=2), model(), BF16, total_bytes=80 * GIB)
    # Of the activations the MLP's part is halved: 7800 * 2 * (4 * 256 / 2) = 7,987,200.
    assert one.activations - two.activations == 7_987_200


@pytest.mark.parametrize(("gpus", "share"), [(1, 256), (2, 128), (4, 128)])
def test_gpus_that_outnumber_the_heads_of_the_cache_have_copies(gpus: int, share: int) -> None:
    """2 heads of 32, keys and values, of 2 bytes: 256 a token; no GPU has less than one head."""
    assert cache_bytes_per_token(engine(tensor_parallel_size=gpus), model(), BF16) == share


def test_a_step_has_room_for_a_token_of_every_running_completion() -> None:
    many = divide(engine(max_concurrent_completions=9999), model(), BF16, total_bytes=80 * GIB)
    # 10,000 tokens * 2 * 1280, and (10,000 + 120) * 1000 * 16 of logits.
    assert many.activations == 25_600_000 + 161_920_000


def test_what_does_not_fit_is_told_in_figures_with_the_keys_to_change() -> None:
    with pytest.raises(ConfigError) as caught:
        divide(engine(engines_per_gpu=4), model(), BF16, total_bytes=7 * GIB)
    # 7 * 0.85 / 4 = 1.4875 GiB; the process alone takes 1.5.
    text = str(caught.value)
    assert "engine.engines_per_gpu=4: each engine has 1.49 GiB" in text
    assert "engine.gpu_memory_utilization=0.85 of 7.00 GiB" in text
    # 1.5 GiB + 387,328 + 22,928,000 + 40,108,032 + 120 tokens * 128 numbers * 2 bytes = 1.56 GiB
    assert "needs 1.56 GiB: 0.00 for weights, 0.00 for copies for adoption, 0.02 for" in text
    assert "0.00 for the cache of one completion of 120 tokens" in text
    assert text.endswith("lower engine.engines_per_gpu, or raise engine.gpu_memory_utilization")


def test_the_last_byte_decides() -> None:
    """A completion of 120 tokens needs 120 * 128 * 2 = 30,720 bytes of cache."""
    needed = 387_328 + 22_928_000 + 41_680_896 + PROCESS + 30_720
    exact = engine(gpu_memory_utilization=1.0, engines_per_gpu=1)
    assert divide(exact, model(), BF16, total_bytes=needed).cache == 30_720
    with pytest.raises(ConfigError, match=r"lower engine\.engines_per_gpu$"):
        divide(exact, model(), BF16, total_bytes=needed - 1)


def test_a_number_that_was_not_measured_yet_is_refused() -> None:
    with pytest.raises(ConfigError, match="asyncrl probe"):
        divide(engine(engines_per_gpu="auto"), model(), BF16, total_bytes=80 * GIB)


@given(
    engines=st.integers(1, 8),
    utilization=st.floats(0.05, 1.0),
    total_gib=st.integers(8, 200),
    layers=st.integers(1, 80),
    completions=st.integers(1, 4096),
)
def test_all_engines_together_stay_within_what_generation_may_use(
    engines: int, utilization: float, total_gib: int, layers: int, completions: int
) -> None:
    config = engine(
        engines_per_gpu=engines,
        gpu_memory_utilization=utilization,
        max_concurrent_completions=completions,
    )
    facts = model(layers=layers, hidden=1024, wide=4096, vocabulary=50_000)
    try:
        found = divide(config, facts, BF16, total_bytes=total_gib * GIB)
    except ConfigError:
        return
    used = found.weights + found.staging + found.activations + found.graphs + found.cache
    assert found.cache > 0
    assert engines * (used + PROCESS) <= utilization * total_gib * GIB
