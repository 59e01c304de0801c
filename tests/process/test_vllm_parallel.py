"""One vLLM engine cut over two worker processes: the same log-probs, before and after an adoption."""

import importlib.util

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from asyncrl.config import VllmEngineConfig
from asyncrl.generator.engines import make_engine
from asyncrl.generator.vllm_worker import SHM_DIR
from tests.engines import reference_logprobs, request, run
from tests.models import make_tiny_model


@pytest.mark.vllm
@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
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
