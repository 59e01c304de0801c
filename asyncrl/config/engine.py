"""Settings of sampling and of the inference engines; `kind` chooses an engine."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from asyncrl.config.section import Section


class SamplingConfig(Section):
    """How completions are sampled."""

    temperature: float = Field(1.0, gt=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 is off."""


MIN_VLLM_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this without an error."""


class EngineSection(Section):
    """What every inference engine is asked for."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU or a CPU with bf16 instructions, float32 elsewhere."""

    max_concurrent_completions: int = Field(64, ge=1)
    """Completions that one engine decodes at the same time."""

    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are skipped and counted."""

    max_completion_tokens: int = Field(32, ge=1)


class HFEngineConfig(EngineSection):
    """The embedded engine over transformers, for CPU and GPU."""

    kind: Literal["hf"] = "hf"
    device: Literal["auto", "cpu", "cuda"] = "auto"


MAX_ENGINES_PER_GPU = 8


def _check_engines(value: object) -> object:
    """One sentence for what pydantic would say of both members of the union."""
    if value == "auto" or (
        type(value) is int and 1 <= value <= MAX_ENGINES_PER_GPU  # True is an int, too
    ):
        return value
    raise ValueError(f'expected 1 to {MAX_ENGINES_PER_GPU}, or "auto", got {value!r}')


class VllmEngineConfig(EngineSection):
    """vLLM 0.26 to 0.33 (extra `vllm`), inside the generator's process."""

    kind: Literal["vllm"] = "vllm"
    engines_per_gpu: Annotated[int | Literal["auto"], BeforeValidator(_check_engines)] = 1
    """Engines that share a GPU (or the tensor_parallel_size GPUs of a place): one alone is bound by its
    host loop. Each is a generator process with max_concurrent_completions and scoring.num_workers of its
    own. "auto" measures first (`asyncrl probe`) and divides max_concurrent_completions among those it
    chooses."""

    mps: Literal["auto", "on", "off"] = "auto"
    """NVIDIA's Multi-Process Service for the engines of a GPU, started and ended by `asyncrl run`: their
    kernels overlap, and a fault on the GPU may restart all of them. auto: if engines_per_gpu is above 1
    and it can be started; on: always, or else the run is refused."""

    gpu_memory_utilization: float = Field(0.85, gt=0.0, le=1.0)
    """Share of the GPU's memory for weights and KV caches of all its engines; lower it when a learner
    shares the GPU."""

    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that one engine is cut over."""

    custom_all_reduce: bool = True
    """Sums between those GPUs by kernels of vLLM's and FlashInfer's, faster than NCCL for small batches,
    which need CUDA's memory sharing between processes and NVLink multicast; false: by NCCL alone, for
    hosts without them (virtual machines, containers)."""

    cache_policy: Literal["keep", "recompute"] = "keep"
    """Running completions when weights are adopted: keep their KV cache (no cost; their stored log-probs
    stay exact, no single version reproduces them), or prefill them again (exact per version, seconds)."""

    enforce_eager: bool = False
    """Without compilation and CUDA graphs: starts in seconds, decodes several times slower."""

    quantization: Literal["none", "fp8"] = "none"
    """fp8: weights are quantized as they are loaded and adopted; bfloat16 on the wire. GPU only."""


DEFAULT_KINDS = {"engine": "hf"}
"""Sections that may leave out `kind`, and what it then is."""


def _default_engine(value: object) -> object:
    return {"kind": DEFAULT_KINDS["engine"]} | value if isinstance(value, dict) else value


EngineConfig = Annotated[
    HFEngineConfig | VllmEngineConfig,
    Field(discriminator="kind"),
    BeforeValidator(_default_engine),
]
