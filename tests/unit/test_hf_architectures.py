"""The embedded engine runs any causal LM with key/value caches, and refuses the others."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from asyncrl.errors import ConfigError
from asyncrl.generator.engine import SampleRequest
from tests.engines import VOCABULARY, new_engine, reference_logprobs, request, run
from tests.models import make_tiny_model

EOS = 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


ARCHITECTURES = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4,
            bos_token_id=1, eos_token_id=EOS, initializer_range=0.3,
        )
    ),
    "qwen2-untied": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            eos_token_id=EOS, tie_word_embeddings=False, initializer_range=0.3,
        )
    ),
    "gemma3-sliding": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=6,
            layer_types=["sliding_attention", "full_attention"], max_position_embeddings=128,
            eos_token_id=EOS, bos_token_id=1, pad_token_id=0, initializer_range=0.3,
        )
    ),
}  # fmt: skip


def save(model, tiny, path):
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures_equal_their_own_full_forward_pass(name, tiny, tmp_path):
    torch.manual_seed(0)
    path = save(ARCHITECTURES[name](), tiny, tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    script = ([request(0, 5, max_tokens=20)], [], [request(1, 17, max_tokens=20)], [request(2, 1)])
    asked = {ask.request_id: ask for batch in script for ask in batch}
    for (request_id, _), completion in run(new_engine(path), script).items():
        expected = reference_logprobs(model, asked[request_id], completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=2e-5)


def test_an_architecture_with_recurrent_state_is_refused_with_a_sentence(tiny, tmp_path):
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=1)
    path = save(MambaForCausalLM(config), tiny, tmp_path / "mamba")
    with pytest.raises(ConfigError, match="MambaForCausalLM, which keeps other state"):
        new_engine(path)


def test_a_model_path_that_cannot_be_loaded_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        new_engine(tmp_path / "absent")


def test_a_row_without_finite_logits_is_aborted_and_the_others_go_on(tiny, tmp_path):
    # F020.
    # Untied: a NaN in the embedding of a token breaks exactly the rows that have it in context.
    torch.manual_seed(0)
    path = save(ARCHITECTURES["qwen2-untied"](), tiny, tmp_path / "m")
    clean = {i: request(i, 5, num_completions=16, max_tokens=12) for i in range(2)}
    expected = run(new_engine(path), [list(clean.values())])
    poison = int(expected[0, 0].tokens[4])
    engine = new_engine(path)
    state = {name: values.clone() for name, values in engine._model.state_dict().items()}
    state["model.embed_tokens.weight"][poison] = float("nan")
    engine.adopt(1, state.items())
    tainted = SampleRequest(
        request_id=7, prompt_tokens=np.array([5, poison], np.int32), num_completions=2, seed=0,
        max_tokens=5,
    )  # fmt: skip
    asks = [ask for ask in clean.values() if poison not in ask.prompt_tokens]
    completions = run(engine, [[tainted, *asks]])
    broken = 0
    for (request_id, index), completion in completions.items():
        if request_id == 7:
            assert (len(completion.tokens), completion.finish_reason) == (0, "abort")
            broken += 1
            continue
        full = expected[request_id, index]
        hits = np.flatnonzero(full.tokens[:-1] == poison)
        kept = len(full.tokens) if hits.size == 0 else int(hits[0]) + 1
        assert completion.tokens.tolist() == full.tokens[:kept].tolist()
        np.testing.assert_allclose(
            completion.behaviour_logprobs, full.behaviour_logprobs[:kept], atol=2e-5
        )
        assert completion.finish_reason == ("abort" if hits.size else full.finish_reason)
        broken += bool(hits.size)
    assert asks
    assert 3 <= broken < len(completions)
    assert engine.num_nonfinite == broken
