"""Adapters on their way into vLLM's slots: the same as vLLM's own way, and before they are asked for.

vLLM's own way is the reference: `slot_plans = None` in the worker leaves everything to it.
"""

import importlib
import importlib.util

import numpy as np
import pytest
import torch

from asyncrl.config import LoraConfig
from asyncrl.generator.merge import AdapterOffer
from tests.engines import prompt, request, run, start_engine
from tests.models import make_tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

# Rank 3 in slots of 8 and some modules only, of fused ones a part: what is not copied must be zero.
LORA = LoraConfig(rank=3, alpha=12.0, target_modules=("q_proj", "v_proj", "down_proj"))
TOKENS = prompt(60, seed=4)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Three slots."""
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=128)
    engine = start_engine("vllm-keep", path, lora=LORA, max_staleness=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def versions(engine):
    facts = engine._model
    shapes = AdapterOffer(facts.state, facts.linear, LORA).zeros()
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(like.shape, generator=generator) * 0.2 for name, like in shapes.items()}
        for _ in range(6)
    ]


def in_worker(engine, work):
    [result] = engine._core.llm.collective_rpc(work)
    return result


def set_plans(engine, plans):
    def change(worker):
        worker.worker.slot_plans = plans  # vLLM hands over a wrapper, which only reads through

    in_worker(engine, change)


def slots(engine):
    """Ids of the adapters that are in slots of the device."""
    return in_worker(engine, lambda worker: set(manager_of(worker).lora_index_to_id) - {None})


def manager_of(worker):
    return worker.model_runner.lora_manager._adapter_manager


@pytest.fixture(scope="module")
def expected(engine, versions):
    """Scores by vLLM's own way."""
    set_plans(engine, None)
    found = []
    for version, tensors in enumerate(versions):
        engine.adopt(version, tensors.items())
        assert newest(engine) not in slots(engine)  # not before the first step that needs it
        found.append(engine.score(TOKENS))
        assert newest(engine) in slots(engine)
    set_plans(engine, {})
    assert np.abs(np.diff(found, axis=0)).max(axis=1).min() > 0.1
    return found


def newest(engine):
    return engine._pinned.newest.request.lora_int_id


def test_it_is_there_before_it_is_asked_for_and_vllm_fills_each_slot_once(
    engine, versions, expected, monkeypatch
):
    filled = []
    for module in in_worker(engine, lambda worker: manager_of(worker).modules).values():
        way = module.set_lora
        monkeypatch.setattr(
            module, "set_lora", lambda *given, way=way: (filled.append(given[0]), way(*given))
        )
    for turn in range(12):
        version = turn % 6
        engine.adopt(version, versions[version].items())
        assert newest(engine) in slots(engine)
        np.testing.assert_array_equal(engine.score(TOKENS), expected[version])
    # Of two layers qkv, o, gate_up and down are wrapped: those with a target.
    assert sorted(set(filled)) == [0, 1]
    assert len(filled) == 2 * 2 * 2


def test_without_a_free_slot_vllm_makes_one_and_every_version_is_sampled_right(engine, versions):
    finished = []
    for version in range(4):
        engine.adopt(version, versions[version].items())
        assert (newest(engine) in slots(engine)) == (version < 3)
        engine.submit(request(version, 20, num_completions=2, max_tokens=12))
        finished += engine.step()
    finished += run(engine).values()
    assert len(finished) == 8
    for completion in finished:
        version = completion.request_id
        assert {span.version for span in completion.version_spans} == {version}
        engine.adopt(version, versions[version].items())
        given = request(version, 20).prompt_tokens
        scores = engine.score(np.concatenate([given, completion.tokens]))
        np.testing.assert_allclose(
            completion.behaviour_logprobs, scores[len(given) - 1 :], atol=1e-5
        )


def test_a_way_that_does_more_than_copy_is_left_to_vllm(engine, versions, expected, monkeypatch):
    def compute(parts, load):
        load()
        raise ValueError("a copy came from no offered tensor")

    module = importlib.import_module("asyncrl.generator.vllm_lora_worker")
    set_plans(engine, {})
    monkeypatch.setattr(module, "record_copies", compute)
    for version in (5, 1, 3):
        engine.adopt(version, versions[version].items())
        assert newest(engine) not in slots(engine)
        np.testing.assert_array_equal(engine.score(TOKENS), expected[version])
    assert in_worker(engine, lambda worker: worker.slot_plans) is None
    set_plans(engine, {})
