"""The embedded engine against plain transformers: one row, no padding, no batching."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from asyncrl.generator import hf_engine
from asyncrl.generator.engine import SampleRequest
from asyncrl.types import VersionSpan
from tests.engines import VOCABULARY, assert_same, new_engine, reference_logprobs, request, run
from tests.models import make_tiny_model

EOS = 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


MIXED = (
    [request(0, 5, num_completions=3, max_tokens=12)],
    [],
    [request(1, 17, temperature=0.7), request(2, 1, temperature=1.3, max_tokens=3)],
    [request(3, 40, num_completions=1, top_k=5), request(4, 9, top_p=0.6, temperature=0.8)],
    [],
    [request(5, 2, top_p=0.9, top_k=20, max_tokens=1), request(6, 3, max_tokens=90)],
)


def test_logprobs_equal_a_full_forward_pass_for_rows_that_join_at_different_times(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    completions = run(new_engine(tiny), MIXED)
    asked = {ask.request_id: ask for batch in MIXED for ask in batch}
    assert len(completions) == sum(ask.num_completions for ask in asked.values())
    for (request_id, _), completion in completions.items():
        expected = reference_logprobs(model, asked[request_id], completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=1e-5)


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


def test_sampled_tokens_follow_the_softmax_of_the_model(tiny):
    # Pearson's chi-square over tokens expected 5 times or more; its mean is df, its deviation
    # sqrt(2 df), and the seed is fixed: 4 deviations is far from chance.
    ask = request(0, num_completions=4000, max_tokens=1, temperature=0.8)
    completions = run(new_engine(tiny, max_concurrent_completions=4000), [[ask]])
    counts = np.bincount([c.tokens[0] for c in completions.values()], minlength=VOCABULARY)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny)(
            torch.from_numpy(ask.prompt_tokens).long()[None]
        ).logits[0, -1]
    expected = 4000 * torch.softmax(logits / 0.8, dim=-1).numpy()
    often = expected >= 5
    groups = [(np.append(x[often], x[~often].sum())).astype(np.float64) for x in (counts, expected)]
    statistic = ((groups[0] - groups[1]) ** 2 / groups[1]).sum()
    degrees = often.sum()
    assert often.sum() > 40
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def test_every_eos_id_of_generation_config_config_and_tokenizer_stops(tiny, tmp_path):
    # F010.
    path = shutil.copytree(tiny, tmp_path / "m")
    for name, ids in (("generation_config.json", [10, 11]), ("config.json", 12)):
        settings_of = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(settings_of | {"eos_token_id": ids}))
    stops = {10, 11, 12, EOS}
    asks = [request(i, num_completions=50, max_tokens=40, temperature=1.5) for i in range(4)]
    completions = run(new_engine(path, max_concurrent_completions=200), [asks])
    for completion in completions.values():
        assert not stops & set(completion.tokens[:-1].tolist())
        stopped = int(completion.tokens[-1]) in stops
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.tokens) == 40
        assert completion.version_spans == (VersionSpan(0, 0, len(completion.tokens)),)
        assert len(completion.behaviour_logprobs) == len(completion.tokens)
    last = {int(c.tokens[-1]) for c in completions.values() if c.finish_reason == "stop"}
    assert last == stops


def test_abort_returns_the_tokens_so_far_and_leaves_the_others_alone(tiny):
    engine = new_engine(tiny, max_concurrent_completions=4)
    keep, gone, waiting = request(0), request(1, 20), request(2)
    expected = run(engine, [[keep]])
    undisturbed = run(engine, [[gone]])
    for ask in (keep, gone, waiting):
        engine.submit(ask)
    for _ in range(3):
        assert engine.step() == []
    aborted = engine.abort(1)
    assert [(c.request_id, c.index, c.finish_reason) for c in aborted] == [
        (1, 0, "abort"), (1, 1, "abort"),
    ]  # fmt: skip
    for completion in aborted:
        full = undisturbed[1, completion.index]
        assert completion.tokens.tolist() == full.tokens[:3].tolist()
    unstarted = engine.abort(2)
    assert [(len(c.tokens), c.version_spans, c.finish_reason) for c in unstarted] == [
        (0, (), "abort"), (0, (), "abort"),
    ]  # fmt: skip
    assert engine.abort(2) == engine.abort(99) == []
    assert engine.num_unfinished == 2
    for key, completion in run(engine).items():
        assert_same(completion, expected[key])


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


def test_requests_start_in_order_only_when_all_completions_fit_and_first_jumps_the_queue(tiny):
    engine = new_engine(tiny, max_concurrent_completions=4)
    for i, size in enumerate((3, 2, 1)):
        engine.submit(request(i, num_completions=size, max_tokens=1))
    engine.submit(request(9, num_completions=2, max_tokens=1), first=True)
    assert engine.num_unfinished == 8
    # 9 takes 2 of 4 slots; 0 needs 3 and waits, and 2 may not overtake it though it would fit.
    orders = []
    while engine.num_unfinished:
        orders.append(sorted({c.request_id for c in engine.step()}))
    assert orders == [[9], [0], [1, 2]]


def test_an_idle_engine_steps_to_nothing(tiny):
    assert new_engine(tiny).step() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_completions": 65}, "engine.max_concurrent_completions=64, got 65"),
        ({"num_completions": 0}, "num_completions"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1019}, "6 prompt tokens .* exceed the model's 1024 positions"),
        ({"length": 0}, "empty"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(tiny_engine, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine.submit(request(0, **options))
    assert tiny_engine.num_unfinished == 0


@pytest.fixture(scope="module")
def tiny_engine(tiny):
    return new_engine(tiny)


def test_a_token_outside_the_vocabulary_and_a_taken_id_are_refused(tiny):
    engine = new_engine(tiny)
    bad = SampleRequest(
        request_id=1, prompt_tokens=np.array([4, 100], np.int32), num_completions=1, seed=0,
        max_tokens=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"token ids outside 0 \.\. 99"):
        engine.submit(bad)
    engine.submit(request(0))
    with pytest.raises(ValueError, match="unfinished request has this id"):
        engine.submit(request(0))
    engine.step()
    with pytest.raises(ValueError, match="unfinished request has this id"):
        engine.submit(request(0))
    run(engine)
    engine.submit(request(0))


def test_the_whole_context_can_be_used(tiny):
    engine = new_engine(tiny)
    assert engine.max_context_tokens == 1024
    completion = run(engine, [[request(0, 1023, max_tokens=1, num_completions=1)]])[0, 0]
    assert len(completion.tokens) == 1


def test_close_leaves_nothing_unfinished(tiny):
    engine = new_engine(tiny)
    engine.submit(request(0))
    engine.step()
    engine.submit(request(1))
    engine.close()
    assert engine.num_unfinished == 0
