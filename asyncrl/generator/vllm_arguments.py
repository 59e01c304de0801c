"""What vLLM is started with, and what each completion asks of it."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from asyncrl.config import LoraConfig, VllmEngineConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import Precision
from asyncrl.generator.hf_model import choose_device, choose_dtype
from asyncrl.generator.memory import (
    NO_LORA,
    graph_sizes,
    prefill_tokens,
    shared_gpu_arguments,
)
from asyncrl.generator.model_facts import ModelFacts
from asyncrl.generator.vllm_worker import EXTENSION

QUANTIZATIONS = {"none": None, "fp8": "fp8_per_tensor"}
NCCL_ALONE = {
    "disable_custom_all_reduce": True,
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}
"""With NCCL_ENVIRONMENT (engines.py): no other kernel sums between GPUs."""

CPU_BLOCK_TOKENS = 32
"""The smallest cache block of vLLM's CPU attention: short prompts are shared too (default 128)."""

MIN_CPU_CACHE_BYTES = 2**26
CPU_PREFILL_TOKENS = 4096
"""Prompt tokens of one step; vLLM's own choice for a CPU."""


def engine_arguments(
    path: str,
    config: VllmEngineConfig,
    model: ModelFacts,
    *,
    lora: LoraConfig = NO_LORA,
    max_staleness: int = 0,
) -> dict[str, Any]:
    """EngineArgs for sampling with the log-probs of what is really sampled, on this device.

    A CPU would give almost all its memory to the cache; it gets what full completions need and a
    quarter more, for half-filled blocks. And vLLM cannot wind a seeded generator back there, which a
    prompt prefilled in pieces needs ("CPU Generator does not use offset", 0.32): whole prompts.

    Raises:
        ConfigError: engines that share a GPU do not fit, or a CPU cannot do what is asked for.
    """
    dtype = choose_dtype(config.dtype, choose_device("auto"))
    context = max_context_tokens(config, model)
    completions = config.max_concurrent_completions + 1  # one more for a scored sequence
    arguments: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "max_model_len": context,
        "max_num_seqs": completions,
        "dtype": str(dtype).removeprefix("torch."),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager,
        "quantization": QUANTIZATIONS[config.quantization],
        "worker_extension_cls": EXTENSION,
    }
    if not config.custom_all_reduce:
        arguments |= NCCL_ALONE
    if current_platform.is_cpu():
        _check_for_cpu(path, config, model)
        needed = context * completions * model.kv_values_per_token * dtype.itemsize
        arguments |= {
            "block_size": CPU_BLOCK_TOKENS,
            "kv_cache_memory_bytes": max(MIN_CPU_CACHE_BYTES, needed * 5 // 4),
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_PREFILL_TOKENS, context),
        }
        return arguments
    arguments["max_num_batched_tokens"] = prefill_tokens(config, context)
    graphs = graph_sizes(config, context)
    arguments |= {"cudagraph_capture_sizes": graphs, "max_cudagraph_capture_size": graphs[-1]}
    if config.engines_per_gpu != 1:
        total_bytes = current_platform.get_device_total_memory()
        arguments |= shared_gpu_arguments(
            config, model, dtype, total_bytes=total_bytes, lora=lora, max_staleness=max_staleness
        )
    return arguments


def _check_for_cpu(path: str, config: VllmEngineConfig, model: ModelFacts) -> None:
    """Refuse what would fail at the first step only."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if config.quantization != "none":
        raise ConfigError(
            f"engine.quantization={config.quantization!r}: vLLM has it on GPUs only; set "
            "engine.quantization='none' on a CPU"
        )
    width = model.kv_values_per_token // (2 * model.num_layers * model.num_kv_heads)
    known = CPUAttentionBackend.get_supported_head_sizes()
    if width not in known:
        raise ConfigError(
            f"model.path={path!r} has attention heads of {width} values; vLLM's CPU attention takes "
            f"{', '.join(map(str, known))}: set engine.kind='hf', or change model.path"
        )


def precision(config: VllmEngineConfig) -> Precision:
    """What the engine computes in."""
    if config.quantization != "none":
        return "fp8"
    dtype = choose_dtype(config.dtype, choose_device("auto"))
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def max_context_tokens(config: VllmEngineConfig, model: ModelFacts) -> int:
    """Prompt plus completion may not be longer: both limits together, or the model's own."""
    return min(model.num_positions, config.max_prompt_tokens + config.max_completion_tokens)


def sampling_params(
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    max_tokens: int,
    stop_tokens: Sequence[int],
) -> SamplingParams:
    """One completion that returns the sampled token's log-prob and keeps its stop token."""
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=list(stop_tokens),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """Log-probs of the prompt's own tokens; the one token sampled after them is thrown away.

    The seed is for the others: beside a request without one, 0.26 ignores all seeds on a CPU.
    """
    return SamplingParams(
        temperature=1.0,
        seed=0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )
