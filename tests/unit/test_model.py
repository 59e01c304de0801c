"""The policy: its log-probs equal the library's own; models it would get wrong are refused."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GraniteConfig, MistralConfig

from asyncrl.errors import ConfigError
from asyncrl.learner.model import Policy, attention_mask, choose_dtype
from tests.models import make_tiny_model
from tests.reference.groups import random_groups
from tests.reference.stepping import (
    load_policy,
    make_optimizer,
    micro_batches,
    pack,
    plain_logprobs,
    run_step,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_equal_the_librarys_own_and_carry_the_temperature(model_path, temperature):
    # F013: shared rows, separate rows, and one plain forward pass per rollout.
    groups = random_groups(np.random.default_rng(4), num_groups=2, group_size=3, vocab=90)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    policy = load_policy(model_path)
    with torch.no_grad():
        wanted = {
            (item.group_id, one.completion_tokens.tobytes()): plain_logprobs(
                model, item.prompt_tokens, one.completion_tokens, temperature
            ).tolist()
            for item in groups
            for one in item.rollouts
        }
        for share in (True, False):
            found = []
            step = pack(groups, share_prompts=share, micro_batch_tokens=64)
            for micro in micro_batches(step):
                logprobs, _ = policy(
                    torch.tensor(micro.tokens).long(),
                    torch.tensor(micro.position_ids).long(),
                    None if micro.is_causal else torch.tensor(micro.segments).long(),
                    torch.tensor(micro.predictor_index),
                    torch.tensor(micro.targets).long(),
                    temperature,
                )
                found += logprobs.tolist()
            flat = sorted(value for values in wanted.values() for value in values)
            assert sorted(found) == pytest.approx(flat, abs=1e-5)


def test_the_mask_lets_completions_see_the_prompt_and_themselves_only():
    segments = torch.tensor([[0, 0, 1, 1, 2, -1]])
    allowed = attention_mask(segments)[0, 0].int().tolist()
    assert allowed == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def tiny(config):
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def test_dropout_never_acts():
    # F018.
    config = GPT2Config(
        vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.5,
        resid_pdrop=0.5, embd_pdrop=0.5,
    )  # fmt: skip
    policy = Policy(tiny(config))
    policy.train()
    tokens = torch.arange(6)[None]
    arguments = (tokens, tokens, None, torch.tensor([2, 3]), torch.tensor([3, 4]), 1.0)
    first, second = policy(*arguments)[0], policy(*arguments)[0]
    assert torch.equal(first, second)


SMALL = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**SMALL, sliding_window=8), "sliding window 8"),
        (GraniteConfig(**SMALL, logits_scaling=1.01), "scaled or capped"),
    ],
)
def test_models_that_compute_logits_another_way_are_refused(config, reason):
    with pytest.raises(ConfigError, match=reason):
        Policy(tiny(config))


def test_a_path_that_is_no_model_names_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_policy(tmp_path / "nothing")


def test_bfloat16_products_keep_parameters_and_logprobs_in_float32(model_path):
    # F017.
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    exact = load_policy(model_path)
    rounded = load_policy(model_path, compute_dtype=torch.bfloat16)
    optimizers = [make_optimizer(exact), make_optimizer(rounded)]
    results = [
        run_step(p, o, pack(groups)) for p, o in zip((exact, rounded), optimizers, strict=True)
    ]
    assert {p.dtype for p in rounded.parameters()} == {torch.float32}
    # bf16 keeps 8 bits; the step must be the same up to that, not merely finite.
    left, right = (r.values["optimizer/grad_norm"] for r in results)
    assert right == pytest.approx(left, rel=0.05)
    assert right != left


def test_the_compute_type_can_be_chosen():
    assert choose_dtype("float32", CPU) == torch.float32
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
