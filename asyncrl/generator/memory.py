"""How the engines of one GPU divide its memory: arithmetic before anything is loaded.

vLLM finds the size of its KV cache by looking at what is free, which says nothing while other engines
start on the same GPU. So it is told: each of n engines on a GPU of M bytes may use

    share = gpu_memory_utilization * M / n  =  weights + staging + activations + graphs + PROCESS + cache

and `cache` is what is left. Estimates are meant to be too large. With itemsize b, t GPUs an engine, T =
prefill_tokens, S sequences, h = hidden size, w = rows of the widest matrix but the vocabulary's:

| part        | bytes on each GPU                                                                     |
|-------------|---------------------------------------------------------------------------------------|
| weights     | numel * b / t; with fp8 every matrix but embedding and head has one byte an element    |
| staging     | the weights once more as they are published: adoption brings them beside the old ones; |
|             | twice with lora.serving="merged" (base and sum). With "pinned" adapters, of rank r,    |
|             | n = sum over linear modules of (in + out): n * b * ((k + 1) * slot rank + (k + 3) * r) |
|             | for vLLM's slots, those that are registered, and one that comes in float32             |
| activations | T * b * (4h + 4w/t) + (S + R) * vocabulary * LOGIT, R = tokens of a scored sequence:   |
|             | residual, input, norm, output; two halves of an MLP, their product, its fp8 copy;      |
|             | logits in b and, in sampling, up to three times in float32                             |
| graphs      | 2 kinds * sizes (`graph_sizes`) * layers * GRAPH_LAYER (nothing if enforce_eager);     |
|             | with "pinned" adapters twice: vLLM captures each with and without one                  |
| PROCESS     | CUDA context, libraries' workspaces, fragments                                         |

The constants were chosen without a GPU at hand; the price of too much is a smaller cache.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.config import LoraConfig, VllmEngineConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.model_facts import ModelFacts

log = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
"""Prompt tokens of one step of an engine that shares its GPU, about; one alone has twice as many."""

LARGEST_GRAPH = 2048
"""Larger batches run without one: they keep a GPU busy for longer than launching them takes the host."""

PREFILL_GRAPH = 512
"""Prompt tokens beside all completions that still run in a graph: a step starts few groups."""

GRAPH_SIZES = (
    1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1024, 32),
    *range(1024, LARGEST_GRAPH + 1, 64),
)  # fmt: skip
"""Batches are padded to one of these. vLLM's own end at 512 or at twice the sequences."""

LOGIT = 16
GRAPH_LAYER = 384 * 2**10
PROCESS = 3 * 2**29
NO_LORA = LoraConfig()
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What the rank of vLLM's slots for adapters may be."""

_MAX_SCORED_TOKENS = 1024
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What one of the engines uses of each of its GPUs, in bytes."""

    share: int
    weights: int
    staging: int
    activations: int
    graphs: int

    @property
    def cache(self) -> int:
        """Left for the KV cache; negative if the rest does not fit."""
        rest = self.weights + self.staging + self.activations + self.graphs + PROCESS
        return self.share - rest


def divide(
    config: VllmEngineConfig,
    model: ModelFacts,
    dtype: torch.dtype,
    *,
    total_bytes: int,
    lora: LoraConfig = NO_LORA,
    max_staleness: int = 0,
) -> Split:
    """The split of a GPU of `total_bytes` for engine.engines_per_gpu engines that compute in `dtype`.

    Raises:
        ConfigError: an engine has no room for the cache of a single completion, in figures; or the
            number of engines was not measured yet.
    """
    engines = config.engines_per_gpu
    if engines == "auto":
        raise ConfigError(
            "engine.engines_per_gpu='auto' is settled by `asyncrl run`; a generator that is started "
            "alone needs the number (`asyncrl probe` prints it)"
        )
    context = _context(config, model)
    sizes = [] if config.enforce_eager else graph_sizes(config, context)
    kinds = 4 if lora.rank and lora.serving == "pinned" else 2
    split = Split(
        share=int(config.gpu_memory_utilization * total_bytes / engines),
        weights=weight_bytes(config, model, dtype),
        staging=staging_bytes(config, model, dtype, lora, max_staleness),
        activations=activation_bytes(config, model, dtype),
        graphs=kinds * len(sizes) * model.num_layers * GRAPH_LAYER,
    )
    one = context * cache_bytes_per_token(config, model, dtype)
    if split.cache < one:
        raise ConfigError(_too_small(config, split, one, context, total_bytes))
    return split


def shared_gpu_arguments(
    config: VllmEngineConfig,
    model: ModelFacts,
    dtype: torch.dtype,
    *,
    total_bytes: int,
    lora: LoraConfig = NO_LORA,
    max_staleness: int = 0,
) -> dict[str, Any]:
    """EngineArgs that keep one of several engines to its part of a GPU of `total_bytes`.

    Raises:
        ConfigError: it does not fit; see the top.
    """
    split = divide(
        config, model, dtype, total_bytes=total_bytes, lora=lora, max_staleness=max_staleness
    )
    per_token = cache_bytes_per_token(config, model, dtype)
    full = split.cache // (per_token * _context(config, model))
    log.info(
        "one of %s engines on this GPU: a KV cache of %.2f GiB holds %d completions of full length "
        "(engine.max_concurrent_completions=%d)",
        config.engines_per_gpu, split.cache / 2**30, full, config.max_concurrent_completions,
    )  # fmt: skip
    return {
        # What vLLM wants to find free when it starts; it takes what is said below.
        "gpu_memory_utilization": split.share / total_bytes,
        "kv_cache_memory_bytes": split.cache,
    }


def weight_bytes(config: VllmEngineConfig, model: ModelFacts, dtype: torch.dtype) -> int:
    """Of the model as an engine holds it, on each of its GPUs."""
    total = 0
    for tensor in {id(tensor): tensor for tensor in model.state.values()}.values():
        is_matrix = tensor.ndim > 1 and tensor.shape[0] != model.vocabulary
        total += tensor.numel() * (
            1 if is_matrix and config.quantization == "fp8" else dtype.itemsize
        )
    return total // config.tensor_parallel_size


def staging_bytes(
    config: VllmEngineConfig,
    model: ModelFacts,
    dtype: torch.dtype,
    lora: LoraConfig,
    max_staleness: int,
) -> int:
    """Of what lies on a GPU beside the weights in use, for adoption or as versions of their own."""
    if lora.rank and lora.serving == "pinned":
        slots = (max_staleness + 1) * slot_rank(lora.rank)
        registered = (max_staleness + 3) * lora.rank
        # All modules: vLLM's fused ones have slots also for parts that lora.target_modules leaves out.
        width = sum(sum(model.state[f"{name}.weight"].shape) for name in model.linear)
        return width * dtype.itemsize * (slots + registered)
    published = config.model_copy(update={"quantization": "none"})
    copies = 2 if lora.rank else 1
    return copies * weight_bytes(published, model, dtype)


def slot_rank(rank: int) -> int:
    """That of vLLM's slots for adapters of `rank`."""
    return next(offered for offered in ADAPTER_RANKS if offered >= rank)


def activation_bytes(config: VllmEngineConfig, model: ModelFacts, dtype: torch.dtype) -> int:
    """The most that a step needs besides weights and cache, generously."""
    widest = max(
        (
            t.shape[-2]
            for t in model.state.values()
            if t.ndim > 1 and t.shape[0] != model.vocabulary
        ),
        default=model.hidden_size,
    )
    width = 4 * model.hidden_size + 4 * widest // config.tensor_parallel_size
    sequences = config.max_concurrent_completions + 1
    scored = min(_MAX_SCORED_TOKENS, config.max_prompt_tokens + config.max_completion_tokens)
    layers = prefill_tokens(config, _context(config, model)) * dtype.itemsize * width
    return layers + (sequences + scored) * model.vocabulary * LOGIT


def prefill_tokens(config: VllmEngineConfig, context: int) -> int:
    """What vLLM calls max_num_batched_tokens: the same number for each sequence, at most `context`.

    While it starts, 0.26 runs a batch of that many tokens, cut over all sequences, with the remainder
    given to the last. One that is longer than `context` reads cache blocks from beyond the end of their
    table: now and then an illegal memory access, before the first request.
    """
    sequences = config.max_concurrent_completions + 1
    budget = PREFILL_TOKENS * (2 if config.engines_per_gpu == 1 else 1)
    return sequences * max(1, min(budget // sequences, context))


def graph_sizes(config: VllmEngineConfig, context: int) -> list[int]:
    """Batches, in tokens, of which CUDA graphs are captured: every completion's token and some prefill.

    vLLM's own choice leaves out most steps in which a group starts, and all of more than 512
    completions; their launches take the host longer than they take the GPU. Sizes are left out that
    its trial batches, cut over the sequences as in `prefill_tokens`, would give a part too long.
    """
    sequences = config.max_concurrent_completions + 1
    limit = min(sequences + PREFILL_GRAPH, prefill_tokens(config, context))
    return [
        size
        for size in GRAPH_SIZES
        if size <= limit and (size < sequences or size // sequences + size % sequences <= context)
    ]


def cache_bytes_per_token(config: VllmEngineConfig, model: ModelFacts, dtype: torch.dtype) -> int:
    """Of the KV cache, on each GPU of an engine; more GPUs than heads have copies of these."""
    per_head = model.kv_values_per_token // model.num_kv_heads
    return per_head * max(1, model.num_kv_heads // config.tensor_parallel_size) * dtype.itemsize


def _context(config: VllmEngineConfig, model: ModelFacts) -> int:
    return min(model.num_positions, config.max_prompt_tokens + config.max_completion_tokens)


def _too_small(
    config: VllmEngineConfig, split: Split, one: int, context: int, total_bytes: int
) -> str:
    parts = {
        "weights": split.weights,
        "copies for adoption": split.staging,
        "activations": split.activations,
        "CUDA graphs": split.graphs,
        "the process": PROCESS,
        f"the cache of one completion of {context} tokens": one,
    }
    needed = ", ".join(f"{size / _GIB:.2f} for {what}" for what, size in parts.items() if size)
    return (
        f"engine.engines_per_gpu={config.engines_per_gpu}: each engine has {split.share / _GIB:.2f} "
        f"GiB (engine.gpu_memory_utilization={config.gpu_memory_utilization:g} of "
        f"{total_bytes / _GIB:.2f} GiB, divided), but needs {sum(parts.values()) / _GIB:.2f} GiB: "
        f"{needed}; lower engine.engines_per_gpu"
        + (
            ", or raise engine.gpu_memory_utilization"
            if config.gpu_memory_utilization < 0.9
            else ""
        )
    )
