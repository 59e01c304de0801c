"""Chooses a generator's engine by `engine.kind`; the only place that knows all of them."""

import os
from collections.abc import Callable

from asyncrl.config import EngineConfig, LoraConfig, VllmEngineConfig
from asyncrl.extras import check_vllm
from asyncrl.generator.engine import Engine
from asyncrl.generator.hf_engine import HFEngine
from asyncrl.generator.memory import NO_LORA

VLLM_ENVIRONMENT = {
    # One process: tensors are handed over by reference, and weights change between two steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # An engine's workers: vLLM forks where it thinks that it may, but this process has threads and CUDA.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
}
VLLM_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the supervisor gives processes their cores
}
"""Unlike VLLM_ENVIRONMENT, what the user has set goes first."""

NCCL_ENVIRONMENT = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
"""With engine.custom_all_reduce=false."""


def make_engine(
    path: str,
    config: EngineConfig,
    *,
    lora: LoraConfig = NO_LORA,
    max_staleness: int = 0,
    on_prefill: Callable[[float, float], None] | None = None,
) -> Engine:
    """Load the model in `path` into the engine that `config` asks for.

    With lora.rank > 0 it adopts adapters; of versions served as adapters (lora.serving="pinned")
    max_staleness + 1 can run in one batch.

    `on_prefill` is called within `step` with the start and end of each prefill, in seconds of
    time.monotonic(), by an engine that can tell it from decoding: the embedded one on a CPU.

    With engine.kind="vllm" this process's environment is changed (VLLM_ENVIRONMENT), and vllm is
    imported, which takes about ten seconds.

    Raises:
        ConfigError: the engine is not installed or cannot start; the message names the cause.
    """
    if isinstance(config, VllmEngineConfig):
        prepare_vllm(config)
        # Only now: vllm reads its environment when it is imported, and others do without it.
        from asyncrl.generator.vllm_engine import VllmEngine

        return VllmEngine(path, config, lora=lora, max_staleness=max_staleness)
    return HFEngine(
        path,
        device=config.device,
        dtype=config.dtype,
        max_concurrent_completions=config.max_concurrent_completions,
        lora=lora,
        on_prefill=on_prefill,
    )


def prepare_vllm(config: VllmEngineConfig | None = None) -> None:
    """Set this process's environment as vllm must find it when it is imported; for an engine of `config`.

    Raises:
        ConfigError: vllm is not installed.
    """
    check_vllm()
    os.environ |= VLLM_ENVIRONMENT
    for name, value in VLLM_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if config is not None and not config.custom_all_reduce:
        os.environ |= NCCL_ENVIRONMENT
