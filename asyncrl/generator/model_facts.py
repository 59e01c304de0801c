"""What a model directory says of a causal LM, without loading a weight of it."""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from asyncrl.errors import ConfigError
from asyncrl.generator.hf_model import end_tokens
from asyncrl.generator.offer import state_of
from asyncrl.weights.adapter import linear_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Names, shapes and numbers of one model."""

    state: dict[str, torch.Tensor]
    """What the learner publishes, on the meta device; tied tensors are one object."""

    linear: tuple[str, ...]
    """Names of the linear modules, without the output head."""

    vocabulary: int
    num_positions: int
    stop_tokens: tuple[int, ...]
    """Every token that ends a sequence, ascending."""

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    kv_values_per_token: int
    """Numbers that the cache of one token holds, over all layers and heads."""


def describe_model(path: str) -> ModelFacts:
    """Read the config, tokenizer and generation config in `path` (a directory or a hub id).

    Raises:
        ConfigError: there is no such model or tokenizer, or transformers does not know it.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path={path!r} cannot be loaded: {error}") from error
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # a model need not have one
        generation = model.generation_config
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelFacts(
        state=state_of(model),
        linear=linear_modules(model, model.get_output_embeddings()),
        vocabulary=text.vocab_size,
        num_positions=getattr(text, "max_position_embeddings", None) or 2**31 - 1,
        stop_tokens=tuple(sorted(end_tokens(generation, config, tokenizer))),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_kv_heads=heads,
        kv_values_per_token=2 * text.num_hidden_layers * heads * width,
    )
