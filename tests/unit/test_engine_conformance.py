"""What every engine promises, checked against plain transformers: one row, no cache, no batching.

fp32; log-probs agree within 1e-3 nats (measured: 5e-6). The model's head is tied, and its end tokens
stand in four places. Engines are started once a module and given their first weights back by `adopt`.
"""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import WeightMismatchError
from asyncrl.generator.engine import SampleRequest
from asyncrl.types import VersionSpan
from tests.engines import (
    ENGINE_KINDS,
    SAME_ATOL,
    VOCABULARY,
    assert_same,
    cached_logprobs,
    prompt,
    reference_logprobs,
    request,
    run,
    start_engine,
)
from tests.models import make_tiny_model

ATOL = 1e-2 if torch.cuda.is_available() else 1e-3
"""Nats. Attention on a GPU multiplies in tf32, with 10 bits (seen: 5.2e-3, of a token with -5.4)."""

APART = 0.5
"""Nats, between the two models; what tells them apart."""

LIMIT = 64
STOPS = {2, 10, 11, 12}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two models of one shape; width 128, because vLLM's CPU attention needs 32 a head."""
    made = []
    for seed in range(2):
        path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=seed, hidden=128)
        for name, ids in (("generation_config.json", [10, 11]), ("config.json", 12)):
            settings = json.loads((path / name).read_text())
            (path / name).write_text(json.dumps(settings | {"eos_token_id": ids}))
        made.append(path)
    return made


@pytest.fixture(scope="module")
def models(paths):
    return [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]


@pytest.fixture(scope="module")
def states(models):
    """What the learner publishes: the tied head is left out."""
    published = []
    for model in models:
        state = {name: values.clone() for name, values in model.state_dict().items()}
        del state["lm_head.weight"]
        published.append(state)
    return published


@pytest.fixture(scope="module", params=ENGINE_KINDS)
def started(request, paths):
    """One engine of each kind, alive for all tests of this file."""
    engine = start_engine(request.param, paths[0])
    yield engine, request.param
    engine.close()


@pytest.fixture
def engine(started, states):
    """The engine, idle, with the first weights as version 0."""
    engine = started[0]
    for request_id in range(100):
        engine.abort(request_id)
    engine.adopt(0, states[0].items())
    assert engine.num_unfinished == 0
    return engine


@pytest.fixture
def recomputes(started):
    return started[1] == "vllm-recompute"


def logprob_of(table, tokens):
    return table.gather(1, torch.from_numpy(tokens).long()[:, None])[:, 0].numpy()


MIXED = (
    [request(0, 5, num_completions=3, max_tokens=12)],
    [],
    [request(1, 17, temperature=0.7), request(2, 1, temperature=1.3, max_tokens=3)],
    [request(3, 40, num_completions=1, top_k=5), request(4, 9, top_p=0.6, temperature=0.8)],
    [],
    [request(5, 2, top_p=0.9, top_k=20, max_tokens=1), request(6, 70, num_completions=5)],
)


def test_logprobs_equal_a_full_forward_pass_for_rows_that_join_at_different_times(engine, models):
    completions = run(engine, MIXED)
    asked = {ask.request_id: ask for batch in MIXED for ask in batch}
    assert len(completions) == sum(ask.num_completions for ask in asked.values())
    for (request_id, _), completion in completions.items():
        expected = reference_logprobs(models[0], asked[request_id], completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=ATOL)
        assert completion.behaviour_logprobs.dtype == np.float32
        assert completion.version_spans == (VersionSpan(0, 0, len(completion.tokens)),)


def test_seeds_repeat_a_completion_in_any_company_and_tell_completions_apart(engine):
    ask = request(0, 8, num_completions=6, max_tokens=16, temperature=1.5)
    alone = run(engine, [[ask]])
    again = run(engine, [[request(7, 20)], [request(8, 3), ask], [request(9, 1)]])
    for key, completion in alone.items():
        assert_same(again[key], completion)
    assert len({tuple(c.tokens) for c in alone.values()}) == 6
    other = run(engine, [[request(0, 8, num_completions=6, max_tokens=16, seed=5)]])
    assert {tuple(c.tokens) for c in other.values()}.isdisjoint(
        {tuple(c.tokens) for c in alone.values()}
    )


def test_sampled_tokens_follow_the_softmax_of_the_model(engine, models):
    # Pearson's chi-square over tokens expected 5 times or more; its mean is df, its deviation
    # sqrt(2 df), and the seeds are fixed: 4 deviations is far from chance.
    asks = [
        SampleRequest(
            request_id=i, prompt_tokens=request(0, 6).prompt_tokens, num_completions=LIMIT,
            seed=i, max_tokens=1, temperature=0.8,
        )
        for i in range(40)
    ]  # fmt: skip
    completions = run(engine, [asks])
    total = 40 * LIMIT
    counts = np.bincount([c.tokens[0] for c in completions.values()], minlength=VOCABULARY)
    with torch.no_grad():
        logits = models[0](torch.from_numpy(asks[0].prompt_tokens).long()[None]).logits[0, -1]
    expected = total * torch.softmax(logits / 0.8, dim=-1).numpy()
    often = expected >= 5
    groups = [np.append(x[often], x[~often].sum()).astype(np.float64) for x in (counts, expected)]
    statistic = ((groups[0] - groups[1]) ** 2 / groups[1]).sum()
    assert often.sum() > 20
    assert statistic < often.sum() + 4 * np.sqrt(2 * often.sum())


def test_every_end_token_of_generation_config_config_and_tokenizer_stops(engine):
    # F010.
    asks = [request(i, num_completions=50, max_tokens=40, temperature=1.5) for i in range(4)]
    completions = run(engine, [asks])
    for completion in completions.values():
        assert not STOPS & set(completion.tokens[:-1].tolist())
        stopped = int(completion.tokens[-1]) in STOPS
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.tokens) == 40
        assert len(completion.behaviour_logprobs) == len(completion.tokens)
    last = {int(c.tokens[-1]) for c in completions.values() if c.finish_reason == "stop"}
    assert last == STOPS


def test_weights_adopted_midway_show_in_spans_and_logprobs(
    engine, recomputes, paths, models, states
):
    early, late = (
        request(i, length, num_completions=8, max_tokens=10) for i, length in enumerate((70, 3))
    )
    engine.adopt(5, states[0].items())
    engine.submit(early)
    finished = [c for _ in range(2) for c in engine.step()]
    engine.submit(late)
    finished += engine.step()
    engine.adopt(6, iter(states[1].items()))
    assert engine.version == 6
    completions = {(c.request_id, c.index): c for c in finished} | run(engine)
    assert len(completions) == 16
    apart = []
    for (request_id, _), completion in completions.items():
        ask, swap = ((early, 3), (late, 1))[request_id]
        length = len(completion.tokens)
        if length <= swap:
            assert completion.version_spans == (VersionSpan(5, 0, length),)
            continue
        assert completion.version_spans == (VersionSpan(5, 0, swap), VersionSpan(6, swap, length))
        single = [reference_logprobs(model, ask, completion.tokens) for model in models]
        kept = cached_logprobs(paths[0], ask, completion.tokens, swap, states[1])
        recomputed = np.append(single[0][:swap], single[1][swap:])
        expected, other = (recomputed, kept) if recomputes else (kept, recomputed)
        got = completion.behaviour_logprobs
        np.testing.assert_allclose(got, expected, atol=ATOL)
        apart.append([np.abs(got - wrong).max() for wrong in (*single, other)])
    # The test has power: no single version gives these numbers, nor does the other policy.
    assert len(apart) >= 8
    assert (np.median(apart, axis=0) > APART).all()


def test_a_new_request_after_adoption_reads_no_cache_of_older_weights(engine, models, states):
    # While the old request still holds its blocks, with the very same prompt.
    old = request(0, 70, num_completions=8, max_tokens=60)
    engine.submit(old)
    for _ in range(4):
        engine.step()
    assert engine.num_unfinished > 0
    engine.adopt(1, states[1].items())
    new = SampleRequest(
        request_id=1, prompt_tokens=old.prompt_tokens, num_completions=4, seed=1, max_tokens=6
    )
    completions = run(engine, [[new]])
    for index in range(4):
        completion = completions[1, index]
        expected = reference_logprobs(models[1], new, completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=ATOL)
        stale = reference_logprobs(models[0], new, completion.tokens)
        assert np.abs(stale - completion.behaviour_logprobs).max() > APART
        assert completion.version_spans == (VersionSpan(1, 0, len(completion.tokens)),)


def test_a_completion_without_a_token_at_adoption_has_only_the_new_version(engine, models, states):
    # More prompt tokens than two steps prefill (45 * 190 > 2 * 4096; the second is on its way), so some
    # completions still wait for their first, most of them with the prompt of one that has started,
    # whose blocks are still held.
    asks = [
        SampleRequest(
            request_id=i, prompt_tokens=prompt(190, i % 45), num_completions=1, seed=i, max_tokens=8
        )
        for i in range(LIMIT)
    ]
    for ask in asks:
        engine.submit(ask)
    finished = engine.step()
    engine.adopt(1, states[1].items())
    completions = {(c.request_id, c.index): c for c in finished} | run(engine)
    assert len(completions) == LIMIT
    fresh = [c for c in completions.values() if c.version_spans[0].version == 1]
    assert 0 < len(fresh) < LIMIT
    for completion in fresh:
        assert completion.version_spans == (VersionSpan(1, 0, len(completion.tokens)),)
        expected = reference_logprobs(models[1], asks[completion.request_id], completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=ATOL)


def test_adoption_many_times_under_load_keeps_every_token_and_its_version(engine, states):
    asks = [request(i, 20 + i, num_completions=4, max_tokens=30, temperature=0.7) for i in range(8)]
    for ask in asks:
        engine.submit(ask)
    finished, version = [], 0
    while engine.num_unfinished:
        finished += engine.step()
        version += 1
        engine.adopt(version, states[version % 2].items())
    assert len(finished) == 32
    assert {c.finish_reason for c in finished} <= {"stop", "length"}
    for completion in finished:
        assert np.isfinite(completion.behaviour_logprobs).all()
        starts = [span.start for span in completion.version_spans]
        versions = [span.version for span in completion.version_spans]
        first = versions[0]
        # One adoption after every step, one token a step: every token has a version of its own.
        assert starts == list(range(len(completion.tokens)))
        assert versions == list(range(first, first + len(versions)))


def test_adopted_tensors_may_be_overwritten_afterwards(engine, models, states):
    offered = {name: values.clone() for name, values in states[1].items()}
    engine.adopt(1, offered.items())
    for values in offered.values():
        values.zero_()
    ask = request(0, 9)
    for completion in run(engine, [[ask]]).values():
        expected = reference_logprobs(models[1], ask, completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=ATOL)


def drop(state, name):
    del state[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: drop(s, "model.norm.weight"), "'model.norm.weight'.*missing"),
        (lambda s: drop(s, "model.embed_tokens.weight"), "'model.embed_tokens.weight'.*missing"),
        (lambda s: s.update(extra=torch.zeros(1)), "'extra' is not in"),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(129)}),
            r"'model.norm.weight': expected \[128\] torch.float32, got \[129\]",
        ),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(128, dtype=torch.int64)}),
            "'model.norm.weight'.*int64",
        ),
        (lambda s: s.update({"lm_head.weight": torch.zeros(VOCABULARY, 128)}), "tied.*differ"),
    ],
)
def test_weights_that_do_not_fit_leave_the_old_ones_and_their_version(
    engine, models, states, change, message
):
    ask = request(0, 6, max_tokens=12)
    expected = run(engine, [[ask]])
    engine.submit(ask)
    finished = engine.step()
    state = dict(states[1])
    change(state)
    with pytest.raises(WeightMismatchError, match=message):
        engine.adopt(4, iter(state.items()))
    assert engine.version == 0
    completions = {(c.request_id, c.index): c for c in finished} | run(engine)
    for key, completion in completions.items():
        assert_same(completion, expected[key])
        assert completion.version_spans == (VersionSpan(0, 0, len(completion.tokens)),)


def test_a_tensor_offered_twice_is_refused(engine, states):
    with pytest.raises(WeightMismatchError, match="twice"):
        engine.adopt(1, [*states[1].items(), next(iter(states[1].items()))])
    assert engine.version == 0


def test_a_tied_head_may_be_offered_if_it_is_equal(engine, models, states):
    head = states[1]["model.embed_tokens.weight"].clone()
    engine.adopt(1, (states[1] | {"lm_head.weight": head}).items())
    ask = request(0, 9)
    for completion in run(engine, [[ask]]).values():
        expected = reference_logprobs(models[1], ask, completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=ATOL)


def test_a_lower_version_is_refused_only_while_rows_with_higher_ones_run(engine, states):
    engine.adopt(5, states[0].items())
    engine.submit(request(0, num_completions=8, max_tokens=20))
    engine.step()
    with pytest.raises(WeightMismatchError, match=r"version 3 offered while \d+ completions"):
        engine.adopt(3, states[1].items())
    assert engine.version == 5
    engine.abort(0)
    engine.adopt(3, states[1].items())
    completion = run(engine, [[request(0)]])[0, 0]
    assert {span.version for span in completion.version_spans} == {3}


def test_a_refused_version_leaves_running_completions_going(engine, models, states):
    ask = request(0, num_completions=8, max_tokens=20)
    engine.adopt(5, states[0].items())
    engine.submit(ask)
    finished = engine.step()
    with pytest.raises(WeightMismatchError):
        engine.adopt(3, states[1].items())
    for _ in range(30):  # 20 tokens, and what is on its way
        finished += engine.step()
    assert {c.index for c in finished} == set(range(8))
    for completion in finished:
        assert completion.finish_reason in {"stop", "length"}
        assert completion.version_spans == (VersionSpan(5, 0, len(completion.tokens)),)
        expected = reference_logprobs(models[0], ask, completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=ATOL)


def test_a_refused_version_counts_the_completions_that_have_tokens_of_a_higher_one(engine, states):
    # More than two steps prefill, as above: some completions are without a token, one step on.
    engine.adopt(5, states[0].items())
    for i in range(LIMIT):
        engine.submit(request(i, 190, num_completions=1))
    engine.step()
    with pytest.raises(WeightMismatchError, match="tokens of versions up to 5; ") as refused:
        engine.adopt(3, states[1].items())
    running = [c for i in range(LIMIT) for c in engine.abort(i) if c.finish_reason == "abort"]
    with_tokens = sum(len(c.tokens) > 0 for c in running)
    assert 0 < with_tokens < len(running)
    assert f"while {with_tokens} completions run" in str(refused.value)


def test_abort_returns_the_tokens_so_far_and_leaves_the_others_alone(engine):
    keep, gone = request(0, 6, num_completions=32), request(1, 20, num_completions=32)
    expected, undisturbed = run(engine, [[keep]]), run(engine, [[gone]])
    finished = []
    for ask in (keep, gone):
        engine.submit(ask)
    for _ in range(3):
        finished += engine.step()
    aborted = engine.abort(1)
    assert {c.request_id for c in aborted} == {1}
    early = {c.index for c in finished if c.request_id == 1}
    assert {c.index for c in aborted} == set(range(32)) - early
    for completion in aborted:
        full = undisturbed[1, completion.index]
        assert completion.finish_reason == "abort"
        length = len(completion.tokens)
        assert length in (2, 3)  # the third may have been in flight
        assert completion.tokens.tolist() == full.tokens[:length].tolist()
        assert completion.version_spans == (VersionSpan(0, 0, length),)
        np.testing.assert_allclose(
            completion.behaviour_logprobs, full.behaviour_logprobs[:length], atol=SAME_ATOL
        )
    assert engine.abort(1) == engine.abort(99) == []
    completions = {(c.request_id, c.index): c for c in finished} | run(engine)
    for key in expected:
        assert_same(completions[key], expected[key])


def test_a_waiting_request_is_aborted_without_tokens(engine):
    engine.submit(request(0, num_completions=LIMIT, max_tokens=20))
    engine.submit(request(1))
    engine.step()
    unstarted = engine.abort(1)
    assert [(len(c.tokens), c.version_spans, c.finish_reason) for c in unstarted] == [
        (0, (), "abort"), (0, (), "abort"),
    ]  # fmt: skip
    assert engine.abort(1) == []


def test_requests_start_in_order_only_when_all_completions_fit_and_first_jumps_the_queue(engine):
    for i, size in enumerate((48, 32, 16)):
        engine.submit(request(i, num_completions=size, max_tokens=1))
    engine.submit(request(9, num_completions=32, max_tokens=1), first=True)
    assert engine.num_unfinished == 128
    # 9 takes 32 of 64 slots; 0 needs 48 and waits, and 2 may not overtake it though it would fit.
    orders = []
    while engine.num_unfinished:
        orders.append(sorted({c.request_id for c in engine.step()}))
    assert [order for order in orders if order] == [[9], [0], [1, 2]]


def test_an_idle_engine_steps_to_nothing(engine):
    assert engine.step() == []
    assert engine.step() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_completions": 65}, "engine.max_concurrent_completions=64, got 65"),
        ({"num_completions": 0}, "num_completions"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1019}, "6 prompt tokens .* exceed"),
        ({"length": 0}, "empty"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(engine, options, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(request(0, **options))
    assert engine.num_unfinished == 0


def test_a_token_outside_the_vocabulary_and_a_taken_id_are_refused(engine):
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


def test_the_whole_context_can_be_used(engine, models):
    room = engine.max_context_tokens
    ask = request(0, room - 1, max_tokens=1, num_completions=1)
    completion = run(engine, [[ask]])[0, 0]
    assert (len(completion.tokens), completion.finish_reason in {"length", "stop"}) == (1, True)
    expected = reference_logprobs(models[0], ask, completion.tokens)
    np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=ATOL)


def test_completions_without_finite_logprobs_are_aborted_counted_and_leave_no_trace(
    engine, models, states
):
    # F020.
    ask = request(0, 9, num_completions=16, max_tokens=40)
    engine.submit(ask)
    finished = [c for _ in range(2) for c in engine.step()]
    before = engine.num_nonfinite
    poisoned = states[1] | {"model.norm.weight": torch.full((128,), float("nan"))}
    engine.adopt(1, poisoned.items())
    finished += run(engine, [[request(1)]]).values()
    broken = [c for c in finished if c.finish_reason == "abort"]
    assert len(finished) == 18
    assert engine.num_nonfinite - before == len(broken) > 8
    assert sum(c.request_id == 1 for c in broken) == 2
    for completion in broken:
        # Two tokens of version 0; the poisoned step added none.
        expected = (VersionSpan(0, 0, 2),) if completion.request_id == 0 else ()
        assert completion.version_spans == expected
        assert len(completion.tokens) == (2 if completion.request_id == 0 else 0)
        assert np.isfinite(completion.behaviour_logprobs).all()
    engine.adopt(2, states[1].items())
    for completion in run(engine, [[ask]]).values():
        expected = reference_logprobs(models[1], ask, completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=ATOL)


def test_scores_are_the_full_forward_pass_of_each_version_and_disturb_nobody(
    engine, models, states
):
    ask = request(0, 70, max_tokens=30, temperature=0.7)
    undisturbed = run(engine, [[ask]])
    tokens = request(3, 90).prompt_tokens
    expected = []
    for model in models:
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens).long()[None]).logits[0, :-1]
        expected.append(logprob_of(torch.log_softmax(logits, dim=-1), tokens[1:]))
    assert np.abs(expected[0] - expected[1]).max() > APART
    engine.submit(ask)
    finished = engine.step()
    np.testing.assert_allclose(engine.score(tokens), expected[0], atol=ATOL)
    # The same sequence again, now that its blocks are in the cache.
    np.testing.assert_allclose(engine.score(tokens), expected[0], atol=ATOL)
    completions = {(c.request_id, c.index): c for c in finished} | run(engine)
    for key, completion in undisturbed.items():
        assert_same(completions[key], completion)
    engine.adopt(1, states[1].items())
    np.testing.assert_allclose(engine.score(tokens), expected[1], atol=ATOL)
