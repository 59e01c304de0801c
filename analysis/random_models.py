"""Model directories of given shapes without weights, for measuring speed only."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from asyncrl.generator.model_facts import describe_model

SMALLEST_VOCABULARY = 512
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": SMALLEST_VOCABULARY,
    },
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "1.4b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 49152,
    },
}  # fmt: skip
"""Llama architecture; 0.134 and 1.386 billion parameters with the tied head counted once."""


def make_model(folder: Path, shape: str) -> None:
    """Write config and tokenizer, without an end token: completions run to their limit."""
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    found = describe_model(str(folder)).stop_tokens
    if found:
        raise ValueError(
            f"the model of {folder} ends at tokens {found}; cases would differ in work"
        )


def random_weights(path: str) -> dict[str, torch.Tensor]:
    """Every tensor that a learner of this model would publish, bfloat16: N(0, 0.02), norms near 1."""
    generator = torch.Generator().manual_seed(0)
    seen: set[int] = set()
    weights = {}
    for name, spec in describe_model(path).state.items():
        if id(spec) not in seen:  # tied ones come once
            seen.add(id(spec))
            values = torch.randn(spec.shape, generator=generator) * 0.02
            weights[name] = (values + (spec.ndim == 1)).to(torch.bfloat16)
    return weights
