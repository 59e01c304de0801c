"""What only the embedded engine promises; the rest is in test_engine_conformance.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from asyncrl.generator import hf_engine
from tests.engines import assert_same, new_engine, request, run
from tests.models import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_request_samples_the_same_alone_as_in_any_company(tiny, data):
    asks = [
        request(
            i,
            data.draw(st.integers(1, 30)),
            num_completions=data.draw(st.integers(1, 3)),
            max_tokens=data.draw(st.integers(1, 10)),
            seed=data.draw(st.integers(0, 2**63)),
        )
        for i in range(data.draw(st.integers(1, 5)))
    ]
    script = [[] for _ in range(8)]
    for ask in asks:
        script[data.draw(st.integers(0, 7))].append(ask)
    engine = new_engine(tiny, max_concurrent_completions=data.draw(st.integers(3, 8)))
    together = run(engine, script)
    for ask in asks:
        for key, completion in run(engine, [[ask]]).items():
            assert_same(completion, together[key])


def test_a_group_costs_one_prefill_and_only_sampled_rows_are_computed(tiny):
    engine = new_engine(tiny)
    tokens = []
    engine._model.register_forward_pre_hook(
        lambda _module, _args, inputs: tokens.append(tuple(inputs["input_ids"].shape)),
        with_kwargs=True,
    )
    logits = []
    engine._model.register_forward_hook(
        lambda _module, _args, output: logits.append(tuple(output.logits.shape))
    )
    engine.submit(request(0, 30, num_completions=8, max_tokens=2))
    engine.submit(request(1, 20, num_completions=4, max_tokens=2))
    run(engine)
    # Two prompts padded to 30 in one forward pass, then the 12 completions, one token each.
    assert tokens[0] == (2, 30)
    assert sum(rows for rows, columns in tokens[1:] if columns == 1) <= 12
    assert {columns for _, columns in tokens[1:]} == {1}
    assert {shape[1] for shape in logits} == {1}


def test_waiting_prompts_are_prefilled_in_portions_of_bounded_size(tiny, monkeypatch):
    engine = new_engine(tiny)
    asks = [request(i, length, max_tokens=2) for i, length in enumerate((30, 20, 30, 70, 10, 5))]
    expected = run(engine, [asks])
    shapes = []
    engine._model.register_forward_pre_hook(
        lambda _module, _args, inputs: shapes.append(tuple(inputs["input_ids"].shape)),
        with_kwargs=True,
    )
    monkeypatch.setattr(hf_engine, "MAX_PREFILL_TOKENS", 60)
    completions = run(engine, [asks])
    # 3 x 30 and 2 x 70 would be over 60; 70 alone is too, and goes alone. One portion a step, and
    # beside it the rows of the step before (two a prompt) decode their second and last token.
    prefills = [(2, 30), (1, 30), (1, 70), (2, 10)]
    assert [shape for shape in shapes if shape[1] > 1] == prefills
    assert shapes[0] == (2, 30)
    assert [shape[1] == 1 for shape in shapes] == [False, *[True, False] * 3, True]
    for key, completion in completions.items():
        assert_same(completion, expected[key])


def test_close_leaves_nothing_unfinished(tiny):
    engine = new_engine(tiny)
    engine.submit(request(0))
    engine.step()
    engine.submit(request(1))
    engine.close()
    assert engine.num_unfinished == 0


def test_float32_weights_are_cast_to_the_type_of_the_engine(tiny, tmp_path):
    other = make_tiny_model(tmp_path / "other", seed=1)
    published = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).state_dict()
    del published["lm_head.weight"]  # tied
    engine = new_engine(tiny, dtype="bfloat16")
    engine.adopt(1, published.items())
    for name, values in published.items():
        assert torch.equal(engine._model.state_dict()[name], values.to(torch.bfloat16))
