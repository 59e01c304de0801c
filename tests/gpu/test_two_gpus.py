"""One vLLM engine cut over two GPUs, in bfloat16: what it adopts is what it computes with.

ASYNCRL_CUSTOM_ALL_REDUCE=0 on a host without CUDA's memory sharing between processes.
"""

import importlib.util
import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import LoraConfig, VllmEngineConfig
from asyncrl.generator.engines import make_engine
from asyncrl.generator.vllm_worker import SHM_DIR
from asyncrl.learner.lora import attach
from tests.engines import reference_logprobs, request, run, run_side_by_side
from tests.models import make_tiny_model
from tests.unit.weight_peers import TRANSPORTS, fetch, generating, learning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

TOLERANCE = 0.05
"""Nats, mean over all tokens; bfloat16 moves logits of a few units by some hundredths. Other weights
differ by more than one."""


def start(path, **more):
    config = VllmEngineConfig(
        tensor_parallel_size=2, max_concurrent_completions=16, gpu_memory_utilization=0.1,
        custom_all_reduce=os.environ.get("ASYNCRL_CUSTOM_ALL_REDUCE") != "0",
    )  # fmt: skip
    return make_engine(str(path), config, **more)


def bfloat16(model):
    """What a learner publishes: the tied head comes once."""
    state = {name: values.to(torch.bfloat16) for name, values in model.state_dict().items()}
    del state["lm_head.weight"]
    return state


def distance(model, ask, completion):
    expected = reference_logprobs(model, ask, completion.tokens)
    return float(np.mean(np.abs(completion.behaviour_logprobs - expected)))


def test_both_halves_adopt_what_is_published(tmp_path):
    paths = [make_tiny_model(tmp_path / str(seed), seed=seed, hidden=256) for seed in range(4)]
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float().eval()
        for path in paths
    ]
    engine = start(paths[0])
    asks = [request(i, 5 + 40 * i, num_completions=3, max_tokens=12) for i in range(3)]
    found, scores = [], []
    # Versions 4 and 5 are weights that it had before, so that bits can be compared.
    for version, number in enumerate((0, 1, 2, 3, 1, 0)):
        if version == 1:
            engine.adopt(version, bfloat16(models[number]).items())
        elif version:
            transport = TRANSPORTS[version % 2]
            published = list(bfloat16(models[number]).items())
            with (
                learning(published, SHM_DIR, transport) as learner,
                generating(SHM_DIR, staging=engine.staging()) as subscriber,
            ):
                staged = fetch(subscriber, learner.publish(version))
                assert staged.file is None  # both halves were staged beside the decode
                engine.adopt(version, staged.tensors(), file=staged.file)
                staged.release()
        completions = run(engine, [asks])
        found.append(
            [
                np.mean([distance(model, asks[key[0]], c) for key, c in completions.items()])
                for model in models
            ]
        )
        scores.append((number, engine.score(asks[2].prompt_tokens)))
    engine.close()
    print("\nmean |difference| by adoption and model:", np.round(found, 4).tolist())
    for number, row in zip((0, 1, 2, 3, 1, 0), found, strict=True):
        assert row[number] < TOLERANCE
        assert min(row[:number] + row[number + 1 :]) > 10 * TOLERANCE
    np.testing.assert_array_equal(scores[4][1], scores[1][1])
    np.testing.assert_array_equal(scores[5][1], scores[0][1])


def test_both_halves_serve_versions_as_adapters_side_by_side(tmp_path):
    path = make_tiny_model(tmp_path / "tiny", hidden=256)
    lora = LoraConfig(rank=8, alpha=12.0)
    loaded = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for _ in range(2)]
    model, rounding = loaded[0].float().eval(), loaded[1].eval()
    own, rounded = (
        dict(attach(each, lora, seed=0, path=str(path)).named_weights())
        for each in (model, rounding)
    )
    generator = torch.Generator().manual_seed(0)
    versions = [
        {
            name: (torch.randn(like.shape, generator=generator) * 0.1 * version).to(torch.bfloat16)
            for name, like in own.items()
        }
        for version in range(3)
    ]
    engine = start(path, lora=lora, max_staleness=2)
    asks = [request(i, 45, num_completions=3, max_tokens=12) for i in range(3)]
    finished = run_side_by_side(engine, versions, asks)
    engine.close()
    assert len(finished) == 9
    table, noise = np.zeros((3, 3)), np.zeros(3)
    for number, weights in enumerate(versions):
        with torch.no_grad():
            for name, values in weights.items():
                own[name].copy_(values)
                rounded[name].copy_(values)
        for completion in finished:
            ask = asks[completion.request_id]
            table[completion.request_id, number] += distance(model, ask, completion) / 3
            if completion.request_id == number:
                theirs = reference_logprobs(rounding, ask, completion.tokens)
                exact = reference_logprobs(model, ask, completion.tokens)
                noise[number] += float(np.mean(np.abs(theirs - exact))) / 3
    print(
        "\nmean |difference| by version of the request and of the model:", table.round(4).tolist()
    )
    print("mean |difference| of transformers in bfloat16:", noise.round(4).tolist())
    # Large adapters round by more; transformers computes in bfloat16 too, in another order.
    assert (table.diagonal() < 3 * noise).all()
    assert all(table[i, j] > 3 * table[i, i] for i in range(3) for j in range(3) if i != j)
