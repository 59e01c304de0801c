"""Loading a causal LM of transformers for sampling, and replacing its weights in place.

Invariant of `load_state`: every name, shape and kind is checked before the first value is written,
so an offer that does not fit leaves the old weights whole.
"""

from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.generator.offer import check_offer, collect, state_of

BF16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""CPU features with which bfloat16 is faster than float32 (the last one is Arm's)."""


def choose_device(device: str) -> torch.device:
    """`engine.device` as a device; "auto" is the GPU if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device='cuda', but torch finds no GPU; set it to 'auto' or 'cpu'")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`engine.dtype` as a type; "auto" is bfloat16 where the hardware computes with it."""
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    if device.type == "cuda":
        return torch.bfloat16
    read = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.9
    features = read() if read is not None else {}
    return torch.bfloat16 if any(features.get(f) for f in BF16_FEATURES) else torch.float32


def load_model(
    path: str, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, frozenset[int]]:
    """Load a causal LM in eval mode, and every token id that ends a sequence.

    Models name end tokens in up to three places (generation config, config, tokenizer) and often
    have several; all of them count.

    Raises:
        ConfigError: there is no such model or tokenizer, or transformers cannot load it.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path!r} cannot be loaded: {error}") from error
    model.to(device).eval().requires_grad_(False)
    return model, end_tokens(model.generation_config, model.config, tokenizer)


def end_tokens(*holders: object) -> frozenset[int]:
    """Every `eos_token_id` of generation config, config (and the text config in it), tokenizer."""
    ids: set[int] = set()
    for holder in holders:
        text_config = getattr(holder, "get_text_config", None)
        for source in (holder, text_config(decoder=True) if text_config else None):
            value = getattr(source, "eos_token_id", None)
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def load_state(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy `tensors` (name, values) over the model's parameters and buffers, casting their dtype.

    Of tied parameters one name is enough; if several come they must be equal.

    Raises:
        WeightMismatchError: naming the first tensor that is unknown, missing, given twice, of
            another shape or kind, or differs from one it is tied to; nothing was written.
    """
    own = state_of(model)
    offered = collect(tensors)
    check_offer(own, offered)
    with torch.no_grad():
        for name, values in offered.items():
            own[name].copy_(values)
