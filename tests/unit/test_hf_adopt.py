"""Replacing the embedded engine's weights: all or nothing, between two tokens."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import WeightMismatchError
from asyncrl.types import VersionSpan
from tests.engines import (
    VOCABULARY,
    assert_same,
    cached_logprobs,
    new_engine,
    reference_logprobs,
    request,
    run,
)
from tests.models import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    """The learner's tensors of another version: the tied head is left out."""
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)
    state = AutoModelForCausalLM.from_pretrained(path).state_dict()
    del state["lm_head.weight"]
    return state


def test_weights_adopted_midway_show_in_spans_and_logprobs_with_the_cache_kept(tiny, other_weights):
    engine = new_engine(tiny, version=5)
    early, late = request(0, 7, max_tokens=10), request(1, 3, max_tokens=10)
    engine.submit(early)
    finished = [c for _ in range(2) for c in engine.step()]
    engine.submit(late)
    finished += engine.step()
    engine.adopt(6, iter(other_weights.items()))
    assert engine.version == 6
    completions = {(c.request_id, c.index): c for c in finished} | run(engine)
    swaps = {0: 3, 1: 1}
    for (request_id, _), completion in completions.items():
        ask, swap = (early, late)[request_id], swaps[request_id]
        length = len(completion.tokens)
        assert length > swap
        assert completion.version_spans == (
            VersionSpan(5, 0, swap),
            VersionSpan(6, swap, length),
        )
        expected = cached_logprobs(tiny, ask, completion.tokens, swap, other_weights)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=1e-5)
        # The test has power: neither version alone gives these numbers.
        model = AutoModelForCausalLM.from_pretrained(tiny)
        for _ in range(2):
            single = reference_logprobs(model, ask, completion.tokens)
            assert np.abs(single - completion.behaviour_logprobs).max() > 1e-3
            model.load_state_dict(other_weights, strict=False)


def test_adopted_tensors_may_be_overwritten_afterwards(tiny, other_weights):
    offered = {name: values.clone() for name, values in other_weights.items()}
    engine = new_engine(tiny)
    engine.adopt(1, offered.items())
    for values in offered.values():
        values.zero_()
    fresh = new_engine(tiny)
    fresh.adopt(1, other_weights.items())
    for key, completion in run(engine, [[request(0)]]).items():
        assert_same(completion, run(fresh, [[request(0)]])[key])


def test_float32_weights_are_cast_to_the_type_of_the_engine(tiny, other_weights):
    engine = new_engine(tiny, dtype="bfloat16")
    engine.adopt(1, other_weights.items())
    for name, values in engine._model.state_dict().items():
        if name in other_weights:
            assert torch.equal(values, other_weights[name].to(torch.bfloat16))


def drop(state, name):
    del state[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: drop(s, "model.norm.weight"), "'model.norm.weight'.*missing"),
        (lambda s: drop(s, "model.embed_tokens.weight"), "'model.embed_tokens.weight'.*missing"),
        (lambda s: s.update(extra=torch.zeros(1)), "'extra' is not in"),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(65)}),
            r"'model.norm.weight': expected \[64\] torch.float32, got \[65\]",
        ),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(64, dtype=torch.int64)}),
            "'model.norm.weight'.*int64",
        ),
        (
            lambda s: s.update({"lm_head.weight": torch.zeros(VOCABULARY, 64)}),
            "tied.*differ",
        ),
    ],
)
def test_weights_that_do_not_fit_leave_the_old_ones_and_their_version(
    tiny, other_weights, change, message
):
    engine = new_engine(tiny, version=3)
    expected = run(engine, [[request(0)]])
    state = dict(other_weights)
    change(state)
    with pytest.raises(WeightMismatchError, match=message):
        engine.adopt(4, iter(state.items()))
    assert engine.version == 3
    for key, completion in run(engine, [[request(0)]]).items():
        assert_same(completion, expected[key])
        assert completion.version_spans[0].version == 3


def test_a_tensor_offered_twice_is_refused(tiny, other_weights):
    engine = new_engine(tiny)
    with pytest.raises(WeightMismatchError, match="twice"):
        engine.adopt(1, [*other_weights.items(), next(iter(other_weights.items()))])


def test_a_tied_head_may_be_offered_if_it_is_equal(tiny, other_weights):
    engine = new_engine(tiny)
    state = other_weights | {"lm_head.weight": other_weights["model.embed_tokens.weight"].clone()}
    engine.adopt(1, state.items())
    assert engine.version == 1


def test_a_lower_version_is_refused_only_while_rows_with_higher_ones_run(tiny, other_weights):
    engine = new_engine(tiny, version=5)
    engine.submit(request(0))
    engine.step()
    with pytest.raises(WeightMismatchError, match="version 3 offered while 2 completions"):
        engine.adopt(3, other_weights.items())
    assert engine.version == 5
    engine.abort(0)
    engine.adopt(3, other_weights.items())
    completion = run(engine, [[request(0)]])[0, 0]
    assert {span.version for span in completion.version_spans} == {3}
