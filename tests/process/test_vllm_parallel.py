"""One vLLM engine cut over two worker processes: the same log-probs, before and after adoptions."""

import importlib.util

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import LoraConfig, VllmEngineConfig
from asyncrl.generator.engines import make_engine
from asyncrl.generator.vllm_worker import SHM_DIR
from asyncrl.learner.lora import attach
from tests.engines import reference_logprobs, request, run
from tests.models import make_tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_two_workers_adopt_weights_and_sample_under_them(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    paths = [make_tiny_model(tmp_path / str(seed), seed=seed, hidden=128) for seed in range(2)]
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]
    config = VllmEngineConfig(
        dtype="float32", enforce_eager=True, tensor_parallel_size=2, max_concurrent_completions=16
    )
    engine = make_engine(str(paths[0]), config)
    try:
        asks = [request(i, 5 + 40 * i, num_completions=3, max_tokens=12) for i in range(3)]
        for version, model in enumerate(models):
            if version:
                published = dict(model.state_dict())
                del published["lm_head.weight"]  # tied
                engine.adopt(version, published.items())
            completions = run(engine, [asks])
            assert len(completions) == 9
            for (request_id, _), completion in completions.items():
                expected = reference_logprobs(model, asks[request_id], completion.tokens)
                np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=1e-3)
    finally:
        engine.close()
    assert list(SHM_DIR.glob("asyncrl-reload-*")) == []


def test_two_workers_serve_versions_as_adapters_side_by_side(tmp_path, monkeypatch):
    # Matrices that are cut by rows and by columns, and of fused ones only a part.
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    path = make_tiny_model(tmp_path / "tiny", hidden=128)
    chosen = ("q_proj", "o_proj", "gate_proj", "down_proj")
    lora = LoraConfig(rank=4, alpha=12.0, target_modules=chosen)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    own = dict(attach(model, lora, seed=0, path=str(path)).named_weights())
    generator = torch.Generator().manual_seed(0)
    versions = [
        {name: torch.randn(like.shape, generator=generator) * 0.2 * v for name, like in own.items()}
        for v in range(3)
    ]
    config = VllmEngineConfig(
        dtype="float32", enforce_eager=True, tensor_parallel_size=2, max_concurrent_completions=16
    )
    engine = make_engine(str(path), config, lora=lora, max_staleness=2)
    try:
        asks = [request(i, 45, num_completions=3, max_tokens=12) for i in range(3)]
        finished = []
        for version, ask in enumerate(asks):
            if version:
                engine.adopt(version, versions[version].items())
            engine.submit(ask)
            finished += engine.step()
        finished += run(engine).values()
    finally:
        engine.close()
    assert len(finished) == 9
    for completion in finished:
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(versions[completion.request_id][name])
        expected = reference_logprobs(model, asks[completion.request_id], completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=1e-5)
        assert {span.version for span in completion.version_spans} == {completion.request_id}
    assert list(SHM_DIR.glob("asyncrl-reload-*")) == []
