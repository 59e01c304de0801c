"""Direct loading: taken where it is the same as vLLM's own reload, refused where it is not."""

import importlib
import importlib.util

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import WeightMismatchError
from tests.engines import (
    keep_weights_unpacked,
    reference_logprobs,
    request,
    run,
    start_engine,
)
from tests.models import make_tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three versions of one model, and where the first lies."""
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=128)
    versions = [AutoModelForCausalLM.from_pretrained(path).eval()]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        with torch.no_grad():
            for values in model.parameters():
                if values.ndim > 1:  # norms stay 1, as they do in bfloat16: no update shows in them
                    values += 0.05 * torch.randn(values.shape, generator=generator)
        versions.append(model)
    return path, versions


def published(model):
    state = dict(model.state_dict())
    del state["lm_head.weight"]  # tied
    return state


def assert_samples_under(engine, model, request_id):
    ask = request(request_id, 40, num_completions=4, max_tokens=12)
    for completion in run(engine, [[ask]]).values():
        expected = reference_logprobs(model, ask, completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=1e-3)


def adopt_all(engine, versions):
    for version in (1, 2, 3):
        engine.adopt(version, published(versions[version % 3]).items())
        assert_samples_under(engine, versions[version % 3], version)


def reloader(engine):
    return engine._core._reloader


def test_direct_loading_is_taken_where_layers_read_their_parameters(models, monkeypatch):
    path, versions = models
    keep_weights_unpacked(monkeypatch)
    engine = start_engine("vllm-keep", path)
    assert reloader(engine).direct is None
    adopt_all(engine, versions)
    assert reloader(engine).direct is True
    # From then on no layer is rebuilt.
    rebuilt = []
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    monkeypatch.setattr(worker, "reload_weights", lambda *_, **__: rebuilt.append(1))
    adopt_all(engine, versions)
    assert rebuilt == []
    engine.close()


def test_direct_loading_is_refused_where_layers_are_packed(models):
    path, versions = models
    engine = start_engine("vllm-keep", path)
    adopt_all(engine, versions)
    assert reloader(engine).direct is False
    engine.close()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_loader_that_skips_a_tensor_is_not_used_directly(models, monkeypatch, name):
    path, versions = models
    keep_weights_unpacked(monkeypatch)
    engine = start_engine("vllm-keep", path)
    llama = importlib.import_module("vllm.model_executor.models.llama").LlamaForCausalLM
    original = llama.load_weights

    def load_weights(self, weights):
        rebuilding = next(self.parameters()).is_meta
        return original(self, (item for item in weights if rebuilding or item[0] != name))

    monkeypatch.setattr(llama, "load_weights", load_weights)
    adopt_all(engine, versions)
    assert reloader(engine).direct is False
    engine.close()


def test_a_loader_that_spoils_something_else_is_found_out(models, monkeypatch):
    path, versions = models
    keep_weights_unpacked(monkeypatch)
    engine = start_engine("vllm-keep", path)
    llama = importlib.import_module("vllm.model_executor.models.llama").LlamaForCausalLM
    original = llama.load_weights

    def load_weights(self, weights):
        if not next(self.parameters()).is_meta:
            dict(self.named_buffers())["model.layers.0.self_attn.rotary_emb.cos_sin_cache"].mul_(2)
        return original(self, weights)

    monkeypatch.setattr(llama, "load_weights", load_weights)
    with pytest.raises(WeightMismatchError, match=r"cos_sin_cache.*engine.kind='hf'"):
        engine.adopt(1, published(versions[1]).items())
    engine.close()


def test_fingerprints_tell_every_byte_and_its_place():
    reload = importlib.import_module("asyncrl.generator.vllm_direct")
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    layer.register_buffer("table", torch.arange(3))
    first = reload.fingerprints(layer)
    negated = reload.negated_fingerprints(layer)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.T.clone())
        layer.table[1] += 1
    second = reload.fingerprints(layer)
    assert {name for name in first if first[name] != second[name]} == {"weight", "table"}
    # Transposed: the same bytes at other places.
    assert first["weight"][0] == second["weight"][0]
    with torch.no_grad():
        layer.weight.copy_(-layer.weight.T.clone())
        layer.bias.neg_()
    assert reload.fingerprints(layer) == negated | {"table": second["table"]}


def test_a_zero_keeps_its_sign_when_it_is_negated():
    reload = importlib.import_module("asyncrl.generator.vllm_direct")
    layer = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
    assert reload.negated_fingerprints(layer) == reload.fingerprints(layer)
