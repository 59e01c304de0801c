"""vLLM on a GPU in bfloat16 and fp8: which version sampled what, checked by forward passes of each.

Each test in a process of its own (`analysis/gpu_run.sh OUT tests`): vLLM has one pool of memory for the
CUDA graphs of a process, which a second engine finds given back (0.26, now and then).

The packaged 135M model. Version 1 has every matrix multiplied by noise of 2 %. Figures are printed (-s).
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import VllmEngineConfig
from asyncrl.generator.engine import SampleRequest
from asyncrl.generator.engines import make_engine

MODEL = Path(os.environ.get("ASYNCRL_MODEL", "models/smollm2-135m"))
NUM_PROMPTS, GROUP_SIZE, TOKENS = 8, 8, 96

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(not MODEL.exists(), reason=f"no model in {MODEL}; make model"),
]


def load(dtype, version=0, *, noise=0.02):
    """The model of a version on the GPU."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for values in model.parameters():
            if version and values.ndim > 1:
                factors = 1 + noise * torch.randn(values.shape, generator=generator)
                values *= factors.to(values.dtype)
    return model.to("cuda", dtype).eval()


def published(model):
    """What the learner would publish."""
    state = dict(model.state_dict())
    state.pop("lm_head.weight", None)  # tied
    return {name: values.to(torch.bfloat16) for name, values in state.items()}


def forward_logprobs(model, tokens):
    """[T - 1] log-probs of a sequence."""
    given = torch.from_numpy(tokens).long().cuda()[None]
    with torch.no_grad():
        table = torch.log_softmax(model(given).logits[0, :-1].float(), -1)
    return table.gather(1, given[0, 1:, None])[:, 0].cpu().numpy()


def start(policy="keep", **options):
    config = VllmEngineConfig(
        max_concurrent_completions=64, max_prompt_tokens=32, max_completion_tokens=TOKENS,
        gpu_memory_utilization=0.15, cache_policy=policy, **options,
    )  # fmt: skip
    return make_engine(str(MODEL), config)


def ask(request_id):
    prompt = np.random.default_rng(request_id).integers(100, 20_000, 24).astype(np.int32)
    return SampleRequest(
        request_id=request_id, prompt_tokens=prompt, num_completions=GROUP_SIZE,
        seed=request_id, max_tokens=TOKENS,
    )  # fmt: skip


def sample_across_an_adoption(engine, state):
    """Completions of which all that are long enough have tokens of two versions."""
    for request_id in range(NUM_PROMPTS):
        engine.submit(ask(request_id))
    finished = []
    for _ in range(40):
        finished += engine.step()
    engine.adopt(engine.version + 1, state.items())
    while engine.num_unfinished:
        finished += engine.step()
    return finished


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_tokens_around_an_adoption_have_the_log_probs_of_their_version(policy):
    models = [load(torch.float32), load(torch.float32, 1)]
    engine = start(policy)
    finished = sample_across_an_adoption(engine, published(models[1]))
    engine.close()
    assert len(finished) == NUM_PROMPTS * GROUP_SIZE
    own, other, two = [], [], 0
    for completion in finished:
        prompt = ask(completion.request_id).prompt_tokens
        both = [
            forward_logprobs(model, np.concatenate([prompt, completion.tokens]))[len(prompt) - 1 :]
            for model in models
        ]
        two += len(completion.version_spans) == 2
        for span in completion.version_spans:
            if policy == "keep" and span.version == 1 and span.start > 0:
                continue  # a mixed cache: no single version reproduces it
            part = slice(span.start, span.end)
            got = completion.behaviour_logprobs[part]
            own += np.abs(got - both[span.version][part]).tolist()
            other += np.abs(got - both[1 - span.version][part]).tolist()
    assert two > len(finished) // 2
    print(
        f"\n{policy}: {len(own)} tokens, own version: mean {np.mean(own):.4f} p99 "
        f"{np.quantile(own, 0.99):.4f} max {max(own):.4f}; other: mean {np.mean(other):.4f}"
    )
    # Logits of 16 and more have a spacing of 0.125 in bfloat16: single tokens cannot be exact.
    assert np.mean(own) < 0.1
    assert np.mean(other) > 3 * np.mean(own)


def test_weights_are_adopted_directly_and_bit_for_bit():
    model, engine = load(torch.bfloat16, 1), start()
    first = engine.score(ask(0).prompt_tokens)
    engine.adopt(1, published(model).items())
    assert engine._core._reloader.direct is True
    changed = engine.score(ask(0).prompt_tokens)
    for version, weights, expected in (
        (2, load(torch.bfloat16), first),
        (3, model, changed),
    ):
        engine.adopt(version, {n: v.cpu() for n, v in published(weights).items()}.items())
        np.testing.assert_array_equal(engine.score(ask(0).prompt_tokens), expected)
    engine.close()
    assert np.abs(changed - first).max() > 0.01


def test_fp8_weights_are_quantized_again_at_every_adoption():
    # Three bits of mantissa are off by 2 to 3 % (rms), in weights and in what they are multiplied with:
    # 0.5 to 0.7 nats on random tokens (seen). Version 1 must be farther away than that.
    models = [load(torch.float32), load(torch.float32, 1, noise=0.08)]
    engine = start(quantization="fp8")
    tokens = np.concatenate([ask(request_id).prompt_tokens for request_id in range(4)])
    distances, scores = [], []
    for version in (0, 1, 0, 1):
        engine.adopt(engine.version + 1, published(models[version]).items())
        found = engine.score(tokens)
        scores.append(found)
        distances.append(
            [float(np.sqrt(np.mean((found - forward_logprobs(m, tokens)) ** 2))) for m in models]
        )
    engine.close()
    print(f"\nfp8, rms distance to (version 0, version 1) after adopting 0, 1, 0, 1: {distances}")
    for version, (to_first, to_second) in zip((0, 1, 0, 1), distances, strict=True):
        own, other = (to_first, to_second) if version == 0 else (to_second, to_first)
        assert own < 1.0
        assert other > 2 * own
    np.testing.assert_array_equal(scores[2], scores[0])
    np.testing.assert_array_equal(scores[3], scores[1])
