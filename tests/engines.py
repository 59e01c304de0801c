"""Starting and driving engines in tests, and plain transformers loops to compare it with."""

import importlib.util
import inspect

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from asyncrl.config import HFEngineConfig, VllmEngineConfig
from asyncrl.generator import memory
from asyncrl.generator.engine import SampleRequest
from asyncrl.generator.engines import make_engine, prepare_vllm
from asyncrl.generator.hf_engine import HFEngine
from tests.reference.sampling import sampled_distribution

ENGINE_KINDS = (
    "hf",
    pytest.param("vllm-keep", marks=pytest.mark.vllm),
    pytest.param("vllm-recompute", marks=pytest.mark.vllm),
    pytest.param("vllm-async", marks=pytest.mark.vllm),
)

SAME_ATOL = 1e-3 if torch.cuda.is_available() else 1e-5
"""Nats, between two batches; a GPU cuts sums according to the batch, and multiplies in tf32."""

VOCABULARY = 100
"""Of the tiny model."""


def new_engine(path, **options):
    defaults = {"device": "cpu", "dtype": "float32", "max_concurrent_completions": 64}
    return HFEngine(str(path), **(defaults | options))


def start_engine(kind, path, **serving):
    """An engine of `ENGINE_KINDS`, fp32, with room for 64 completions of 300 tokens."""
    common = {
        "dtype": "float32", "max_concurrent_completions": 64, "max_prompt_tokens": 200,
        "max_completion_tokens": 100,
    }  # fmt: skip
    if kind == "hf":
        return make_engine(str(path), HFEngineConfig(device="cpu", **common), **serving)
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    policy = "recompute" if kind == "vllm-recompute" else "keep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_CI_ENV", "1")  # no warm-up
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        if kind == "vllm-async":
            keep_async_scheduling(patch)
        patch.setattr(memory, "PREFILL_TOKENS", 2048)  # a GPU's steps as small as a CPU's
        config = VllmEngineConfig(
            cache_policy=policy, enforce_eager=True, gpu_memory_utilization=0.2, **common
        )
        return make_engine(str(path), config, **serving)


def keep_weights_unpacked(patch):
    """What vLLM does on a GPU, linear layers that read their parameters; on a CPU they are packed.

    Must hold as long as the engine lives: layers are packed at every layerwise load.
    """
    prepare_vllm()
    patch.setattr(importlib.import_module("vllm._custom_ops"), "_supports_onednn", False)


def keep_async_scheduling(patch):
    """What vLLM does on a GPU, one batch always on its way; on a CPU it is only switched off."""
    prepare_vllm()
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    original = platform.check_and_update_config

    def check(cls, config):
        original(config)
        config.scheduler_config.async_scheduling = True

    patch.setattr(platform, "check_and_update_config", classmethod(check))


def prompt(length, seed=0):
    # Ids 0 to 3 are the special tokens.
    return np.random.default_rng(seed).integers(4, VOCABULARY, length).astype(np.int32)


def request(request_id, length=6, **options):
    defaults = {"num_completions": 2, "seed": 100 + request_id, "max_tokens": 8}
    return SampleRequest(
        request_id=request_id, prompt_tokens=prompt(length, request_id), **(defaults | options)
    )


def run(engine, script=()):
    """Submit `script[i]` before step i, run dry; completions by (request, index)."""
    finished, step = [], 0
    while engine.num_unfinished or step < len(script):
        for item in script[step] if step < len(script) else ():
            engine.submit(item)
        finished += engine.step()
        step += 1
    assert len({(c.request_id, c.index) for c in finished}) == len(finished)
    return {(c.request_id, c.index): c for c in finished}


def run_side_by_side(engine, versions, asks):
    """Completions of `asks`, each under the next of `versions`, a step apart."""
    finished = []
    for version, ask in enumerate(asks):
        if version:
            engine.adopt(version, versions[version].items())
        engine.submit(ask)
        finished += engine.step()
    return [*finished, *run(engine).values()]


def assert_same(one, other):
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.finish_reason == other.finish_reason
    np.testing.assert_allclose(one.behaviour_logprobs, other.behaviour_logprobs, atol=SAME_ATOL)


def reference_logprobs(model, ask, tokens):
    """Log mu of each token from one full forward pass over prompt and completion."""
    sequence = torch.from_numpy(np.concatenate([ask.prompt_tokens, tokens])).long()[None]
    with torch.no_grad():
        logits = model(sequence).logits[0, len(ask.prompt_tokens) - 1 : -1].float()
    if ask.top_p == 1.0 and ask.top_k == 0:
        table = torch.log_softmax(logits / ask.temperature, dim=-1)
        return table.gather(1, torch.from_numpy(tokens).long()[:, None])[:, 0].numpy()
    rows = zip(logits.tolist(), tokens.tolist(), strict=True)
    return np.log(
        [sampled_distribution(r, ask.temperature, ask.top_p, ask.top_k)[t] for r, t in rows]
    )


def cached_logprobs(path, ask, tokens, swap_at, state):
    """Plain token-by-token loop: one row, its own cache kept, weights swapped before a token."""
    model = AutoModelForCausalLM.from_pretrained(path)
    parameters = inspect.signature(model.forward).parameters
    cache = {"cache" if "cache" in parameters else "past_key_values": DynamicCache()}
    given, logprobs = ask.prompt_tokens, []
    for position, token in enumerate(tokens.tolist()):
        if position == swap_at:
            model.load_state_dict(state, strict=False)
        with torch.no_grad():
            logits = model(torch.as_tensor(given).long()[None], **cache).logits[0, -1]
        logprobs.append(float(torch.log_softmax(logits / ask.temperature, -1)[token]))
        given = [token]
    return np.array(logprobs)
