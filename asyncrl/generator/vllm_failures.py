"""Why vLLM did not start: our error, with the key to change, for whatever it raised."""

import re

import torch

from asyncrl.errors import ConfigError, DeviceError

_ADVICE = (
    (
        ("memory", "kv cache", "max_num_seqs"),
        "change engine.gpu_memory_utilization, or lower engine.max_concurrent_completions, "
        "engine.max_prompt_tokens or engine.max_completion_tokens",
    ),
    (("quantiz", "fp8"), "change engine.quantization or engine.dtype"),
    (("tensor parallel", "world size", "world_size"), "change engine.tensor_parallel_size"),
    (
        ("architecture",),
        "vLLM does not have it: set engine.kind='hf', or change model.path",
    ),
    (("dtype", "float16", "float32"), "change engine.dtype"),
)
"""Words of a failure, and the keys that change it; the first that fits counts."""

_MAX_CAUSE_LENGTH = 400

_LASTING = (
    "out of memory", "ALLOC_FAILED", "no kernel image", "busy or unavailable", "invalid device",
)  # fmt: skip
"""Of CUDA errors: those that another try does not change."""

_CUDA = ("CUDA error", "Triton Error [CUDA]", "MPS server", "MPS client")
"""Words of a failed call of CUDA; the last two while a Multi-Process Service recovers from a fault."""

_DISTURBED = "Error in memory profiling"
"""vLLM looks twice at what is free, and does not start if it is more the second time."""


def is_device_fault(error: Exception) -> bool:
    """Whether something failed on the GPU that another try may not meet again."""
    cause = str(error)
    is_cuda = any(words in cause for words in _CUDA)
    is_lasting = any(words in cause for words in _LASTING)
    return (is_cuda and not is_lasting) or _DISTURBED in cause


def _one_line(error: Exception) -> str:
    cause = " ".join(str(error).split()) or type(error).__name__
    # What pydantic puts around a message of vLLM's.
    return re.sub(r"^\d+ validation errors? for \w+ Value error, | \[type=.*$", "", cause)


def start_failure(path: str, error: Exception, *, num_gpus: int = 1) -> ConfigError | DeviceError:
    """Our error for whatever vLLM raised: the cause in a sentence, and the key that changes it.

    `num_gpus` is how many the engine was to be cut over.
    """
    cause = _one_line(error)
    if len(cause) > _MAX_CAUSE_LENGTH:
        cause = cause[:_MAX_CAUSE_LENGTH] + " ..."
    if is_device_fault(error):
        if _DISTURBED in cause:
            advice = "start one after another what shares the GPU"
        elif num_gpus > 1:
            advice = (
                "if it does, this host may lack memory shared between GPUs: "
                "engine.custom_all_reduce=false goes without"
            )
        else:
            advice = "engine.enforce_eager=true goes without CUDA graphs"
        return DeviceError(
            f"vLLM failed on the GPU while it started: {cause} (that need not happen again; {advice})"
        )
    lowered = str(error).lower()
    advice = next(
        (keys for words, keys in _ADVICE if any(word in lowered for word in words)),
        "check the files in model.path",
    )
    if isinstance(error, torch.OutOfMemoryError):
        advice = _ADVICE[0][1]
    return ConfigError(f"vLLM cannot start with model.path={path!r}: {cause} ({advice})")
