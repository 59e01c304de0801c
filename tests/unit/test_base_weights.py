"""A whole version for vLLM, out of the model as it was loaded and an adapter."""

import importlib
import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import LoraConfig
from asyncrl.generator.engines import prepare_vllm
from asyncrl.generator.merge import AdapterOffer
from asyncrl.generator.model_facts import describe_model
from asyncrl.weights.adapter import adapter_names
from asyncrl.weights.snapshot import named_weights
from tests.models import make_tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_a_merged_version_is_whole_and_in_the_models_order(tmp_path):
    path = make_tiny_model(tmp_path / "tiny", seed=1)
    prepare_vllm()
    module = importlib.import_module("asyncrl.generator.vllm_lora")
    model = AutoModelForCausalLM.from_pretrained(path)
    lora = LoraConfig(rank=3, alpha=12.0, target_modules=("k_proj", "down_proj"))
    facts = describe_model(str(path))
    offer = AdapterOffer(facts.state, facts.linear, lora)
    base = module.BaseWeights(str(path), torch.float32, offer, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    adapter = {n: torch.randn(v.shape, generator=draw) for n, v in offer.zeros().items()}
    merged = base.merged(adapter.items())
    assert list(merged) == [name for name, _ in named_weights(model)]
    for name, weight in named_weights(model):
        if "k_proj" in name or "down_proj" in name:
            a, b = (adapter[n] for n in adapter_names(name.removesuffix(".weight")))
            torch.testing.assert_close(merged[name], weight.detach() + 4.0 * b @ a)
        else:
            assert torch.equal(merged[name], weight)
    # Beside the adapted weights no second copy of them is kept.
    assert not any("k_proj" in name or "down_proj" in name for name in base._others)
