"""What a LoRA adapter consists of, as learner and engines both know it: modules, names, shapes, scale.

With an adapter (`lora.rank` > 0) only these tensors are published, under the names of PEFT's
adapter_model.safetensors, two for each module M whose weight is [out, in]:

    base_model.model.M.lora_A.weight   A [rank, in]
    base_model.model.M.lora_B.weight   B [out, rank]

    M(x) = W x + scale * B A x,    scale = alpha / rank    (arXiv:2106.09685, section 4.1)

Both sides derive them from the model and the configuration, so an offer can be checked before a byte
of it is used.
"""

import shutil
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

import torch
from torch import nn

from asyncrl.config import LoraConfig
from asyncrl.errors import ConfigError

_HAS_TRITON = find_spec("triton") is not None and any(map(shutil.which, ("gcc", "clang")))
"""Every build of torch for Linux and GPUs brings it; it needs a compiler for what starts its kernels."""


def linear_modules(model: nn.Module, head: nn.Module | None) -> tuple[str, ...]:
    """Names of the linear modules of a causal LM, in the model's order, its output `head` left out."""
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    )


def adapted_modules(linear: Iterable[str], lora: LoraConfig) -> list[str]:
    """Those of the linear modules that get an adapter.

    Raises:
        ConfigError: a name in lora.target_modules is the end of none of them.
    """
    names = list(linear)
    if not names:
        raise ConfigError(f"lora.rank={lora.rank}: this model.path has no linear module to adapt")
    if lora.target_modules == "all-linear":
        return names
    for end in lora.target_modules:
        if not any(_ends_with(name, end) for name in names):
            known = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(
                f"lora.target_modules: {end!r} is no linear module of this model.path, nor the end of "
                f"one; it has {', '.join(known)} (the output head cannot be adapted)"
            )
    return [name for name in names if any(_ends_with(name, end) for end in lora.target_modules)]


def adapter_names(module: str) -> tuple[str, str]:
    """What a module's A and B are called when they are published."""
    return (f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight")


def adapter_state(
    weights: Mapping[str, torch.Tensor], modules: Iterable[str], rank: int
) -> dict[str, torch.Tensor]:
    """Every tensor of an adapter, on the meta device; `weights` is the model's state by name."""
    state = {}
    for module in modules:
        weight = weights[f"{module}.weight"]
        out, into = weight.shape
        for name, shape in zip(adapter_names(module), ((rank, into), (out, rank)), strict=True):
            state[name] = torch.empty(shape, dtype=weight.dtype, device="meta")
    return state


def merges_in_one_pass(device: torch.device) -> bool:
    """Whether `merged_weight` takes no memory there but for its result."""
    return device.type == "cuda" and _HAS_TRITON


def merged_weight(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """W + scale * B A, on the device and in the type of `base`: summed in float32, rounded once.

    Shapes are [M, out, in], [M, rank, in] and [M, out, rank], of M modules; all are contiguous.
    """
    if merges_in_one_pass(base.device):
        from asyncrl.weights.merge_kernel import merge

        common = torch.promote_types(a.dtype, b.dtype)
        with torch.cuda.device(base.device):
            return merge(base, a.to(base.device, common), b.to(base.device, common), scale)
    product = b.to(base.device, torch.float32) @ a.to(base.device, torch.float32)
    return torch.add(base, product, alpha=scale, out=torch.empty_like(base))


def _ends_with(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")
