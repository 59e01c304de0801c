"""What every engine promises about adapters, merged or pinned, against PEFT's own forward pass.

fp32; five versions of one model that differ by nats. Version 0 is the model without an adapter.
"""

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from asyncrl.config import LoraConfig
from asyncrl.errors import WeightMismatchError
from asyncrl.generator.engine import SampleRequest
from asyncrl.types import VersionSpan
from asyncrl.weights.adapter import adapter_names
from tests.engines import prompt, reference_logprobs, request, run, start_engine
from tests.models import make_tiny_model

ATOL = 1e-3 if torch.cuda.is_available() else 1e-5
RANK, ALPHA, MAX_STALENESS = 3, 12.0, 4
KINDS = (
    "hf merged",
    pytest.param("vllm-keep merged", marks=pytest.mark.vllm),
    pytest.param("vllm-keep pinned", marks=pytest.mark.vllm),
    pytest.param("vllm-async pinned", marks=pytest.mark.vllm),
)
NAME = adapter_names("model.layers.1.self_attn.k_proj")[1]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1, hidden=128)


@pytest.fixture(scope="module")
def peft_model(path):
    settings = PeftConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(AutoModelForCausalLM.from_pretrained(path), settings).eval()


@pytest.fixture(scope="module")
def versions(peft_model):
    """Adapters as published; version 0's changes nothing."""
    found = []
    shapes = {
        name.replace(".default", ""): parameter.shape
        for name, parameter in peft_model.named_parameters()
        if ".lora_" in name
    }
    for version in range(8):
        generator = torch.Generator().manual_seed(version)
        found.append(
            {
                name: torch.randn(shape, generator=generator) * (0.1 if version else 0.0)
                for name, shape in shapes.items()
            }
        )
    return found


@pytest.fixture(scope="module")
def expected(peft_model, versions):
    """Log-probs of tokens after a prompt, by version."""

    def logprobs(version, ask, tokens):
        set_peft_model_state_dict(peft_model, versions[version])
        return reference_logprobs(peft_model, ask, tokens)

    return logprobs


@pytest.fixture(scope="module")
def scored(expected):
    def scores(version, tokens):
        ask = SampleRequest(
            request_id=0, prompt_tokens=tokens[:1], num_completions=1, seed=0, max_tokens=1
        )
        return expected(version, ask, tokens[1:])

    return scores


@pytest.fixture(scope="module", params=KINDS)
def started(request, path):
    kind, serving = request.param.split()
    lora = LoraConfig(rank=RANK, alpha=ALPHA, serving=serving)
    engine = start_engine(kind, path, lora=lora, max_staleness=MAX_STALENESS)
    yield engine, serving
    engine.close()


@pytest.fixture(scope="module")
def first(started, versions):
    """The engine's first adoptions: one prompt asked under each version, all of them at once."""
    engine, _ = started
    asks, finished = [], []
    for version in range(5):
        if version:
            engine.adopt(version, versions[version].items())
        asks.append(same_prompt(version, max_tokens=30))
        engine.submit(asks[-1])
        finished += engine.step()
    return asks, finished + list(run(engine).values())


@pytest.fixture
def engine(started, first):
    return started[0]


@pytest.fixture
def pinned(started, first):
    if started[1] != "pinned":
        pytest.skip("of pinned versions")
    return started[0]


def same_prompt(request_id, **options):
    """Long enough that its blocks are cached."""
    return SampleRequest(
        request_id=request_id, prompt_tokens=prompt(70), seed=request_id,
        **({"num_completions": 3, "max_tokens": 12} | options),
    )  # fmt: skip


def test_five_versions_in_one_batch_are_sampled_each_under_its_own(started, first, expected):
    if started[1] != "pinned":
        pytest.skip("of pinned versions")
    asks, finished = first
    assert len(finished) == 15
    apart = []
    for completion in finished:
        version = completion.request_id
        assert completion.version_spans == (VersionSpan(version, 0, len(completion.tokens)),)
        wanted = [expected(other, asks[version], completion.tokens) for other in range(5)]
        got = completion.behaviour_logprobs
        np.testing.assert_allclose(got, wanted[version], atol=ATOL)
        apart += [np.abs(got - wanted[v]).max() for v in range(5) if v != version]
    # The test has power, and the common prompt's blocks served one version only.
    assert np.median(apart) > 1


def test_a_version_that_is_adopted_is_pefts_own_forward_pass(engine, versions, expected, scored):
    for version in (3, 1, 0, 2):
        engine.adopt(version, iter(versions[version].items()))
        assert engine.version == version
        ask = same_prompt(0)
        for completion in run(engine, [[ask]]).values():
            assert completion.version_spans == (VersionSpan(version, 0, len(completion.tokens)),)
            wanted = expected(version, ask, completion.tokens)
            np.testing.assert_allclose(completion.behaviour_logprobs, wanted, atol=ATOL)
        tokens = prompt(90, seed=5)
        np.testing.assert_allclose(engine.score(tokens), scored(version, tokens), atol=ATOL)


def test_the_thousandth_adoption_is_as_exact_as_the_first(engine, versions):
    tokens = prompt(60, seed=4)
    engine.adopt(1, versions[1].items())
    once = engine.score(tokens)
    for turn in range(60):
        engine.adopt(turn, versions[2 + turn % 3].items())
    engine.adopt(1, versions[1].items())
    assert np.array_equal(engine.score(tokens), once)


def test_adopted_tensors_are_left_alone_and_may_be_overwritten(engine, versions, scored):
    # vLLM multiplies B by alpha / rank where it stands.
    offered = {name: values.clone() for name, values in versions[2].items()}
    engine.adopt(2, offered.items())
    assert all(torch.equal(offered[name], values) for name, values in versions[2].items())
    for values in offered.values():
        values.zero_()
    tokens = prompt(60, seed=4)
    np.testing.assert_allclose(engine.score(tokens), scored(2, tokens), atol=ATOL)


def test_the_order_of_the_tensors_does_not_matter(engine, versions, scored):
    tokens = prompt(60, seed=4)
    for version in (2, 3):
        items = list(versions[version].items())
        engine.adopt(version, items[3:] + items[2::-1])
        np.testing.assert_allclose(engine.score(tokens), scored(version, tokens), atol=ATOL)


def drop(state):
    del state[NAME]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, f"'{NAME}'.*missing"),
        (lambda s: s.update(extra=torch.zeros(1)), "'extra' is not in"),
        (
            lambda s: s.update({NAME: torch.zeros(64, 4)}),
            rf"'{NAME}': expected \[64, 3\] torch.float32, got \[64, 4\]",
        ),
        (lambda s: s.update({NAME: torch.zeros(64, 3, dtype=torch.int8)}), f"'{NAME}'.*int8"),
    ],
)
def test_an_adapter_that_does_not_fit_leaves_the_old_one(engine, versions, scored, change, message):
    engine.adopt(1, versions[1].items())
    offered = dict(versions[2])
    change(offered)
    with pytest.raises(WeightMismatchError, match=message):
        engine.adopt(2, offered.items())
    with pytest.raises(WeightMismatchError, match="twice"):
        engine.adopt(2, [*versions[2].items(), (NAME, versions[2][NAME])])
    assert engine.version == 1
    tokens = prompt(60, seed=4)
    np.testing.assert_allclose(engine.score(tokens), scored(1, tokens), atol=ATOL)


def test_merged_versions_change_under_a_running_completion(started, engine, versions):
    if started[1] != "merged":
        pytest.skip("of merged versions")
    engine.adopt(1, versions[1].items())
    engine.submit(request(0, num_completions=8, max_tokens=10))
    finished = [c for _ in range(2) for c in engine.step()]
    engine.adopt(2, versions[2].items())
    finished += run(engine).values()
    longer = [c for c in finished if len(c.tokens) > 2]
    assert len(longer) > 4
    for completion in longer:
        length = len(completion.tokens)
        assert completion.version_spans == (VersionSpan(1, 0, 2), VersionSpan(2, 2, length))


def registered(engine):
    return engine._core.llm.engine_core.list_loras()


def test_a_long_completion_keeps_its_version_while_many_others_come_and_go(
    pinned, versions, expected
):
    pinned.adopt(1, versions[1].items())
    run(pinned)
    long = same_prompt(0, num_completions=16, max_tokens=60)
    pinned.submit(long)
    finished = pinned.step()
    for turn in range(25):
        version = 2 + turn % 5
        pinned.adopt(version, versions[version].items())
        pinned.submit(same_prompt(1 + turn, num_completions=1, max_tokens=1))
        for _ in range(3):
            finished += pinned.step()
        # Version 1's, the newest, and what a token or two in flight may still hold.
        assert len(registered(pinned)) <= 4
    finished += run(pinned).values()
    assert len(finished) == 41
    for completion in finished:
        turn = completion.request_id - 1
        version = 1 if completion.request_id == 0 else 2 + turn % 5
        ask = long if completion.request_id == 0 else same_prompt(1 + turn)
        assert completion.version_spans == (VersionSpan(version, 0, len(completion.tokens)),)
        wanted = expected(version, ask, completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, wanted, atol=ATOL)
    assert any(len(c.tokens) > 50 for c in finished)
    pinned.adopt(7, versions[7].items())
    # What was the newest until now is dropped by the next adoption.
    assert len(registered(pinned)) <= 2


def in_worker(engine, method, *arguments):
    [result] = engine._core.llm.collective_rpc(method, args=arguments)
    return result


def adapter_tensors(worker):
    """Those of the newest adapter that vLLM holds."""
    *_, adapter = worker.model_runner.lora_manager._adapter_manager.list_adapters().values()
    found = []
    for lora in adapter.loras.values():
        for factor in (lora.lora_a, lora.lora_b):
            found += factor if isinstance(factor, list) else [factor]
    return found


def test_an_adapter_is_one_copy_in_one_piece_of_memory(pinned, versions):
    offered = versions[3]
    pinned.adopt(3, offered.items())
    held = in_worker(pinned, adapter_tensors)
    # Two layers of seven linear modules, A and B of each.
    assert len(held) == len(offered) == 28
    [memory] = {tensor.untyped_storage().data_ptr() for tensor in held}
    assert memory not in {tensor.untyped_storage().data_ptr() for tensor in offered.values()}
    assert sum(tensor.numel() for tensor in held) == sum(v.numel() for v in offered.values())


def test_an_adapter_of_a_module_that_vllm_does_not_have_is_not_registered(pinned, versions, scored):
    pinned.adopt(2, versions[2].items())
    before = registered(pinned)
    odd = {name.replace("k_proj", "x_proj"): values for name, values in versions[3].items()}
    with pytest.raises(WeightMismatchError, match=r"layers\.0\.self_attn\.x_proj' and 1 other"):
        in_worker(pinned, "put_adapter", 10**6, odd, RANK, ALPHA / RANK)
    assert registered(pinned) == before
    tokens = prompt(60, seed=4)
    np.testing.assert_allclose(pinned.score(tokens), scored(2, tokens), atol=ATOL)
    pinned.adopt(4, versions[4].items())
    np.testing.assert_allclose(pinned.score(tokens), scored(4, tokens), atol=ATOL)


def sampled_versions(engine, before):
    """Versions of running completions that the last step gave a token."""
    rows = engine._rows
    return {
        row.pinned.version for name, row in rows.items() if len(row.tokens) > before.get(name, 0)
    }


def test_more_versions_than_fit_one_batch_wait_and_nothing_fails(pinned, versions, expected):
    # k + 1 = 5 adapters decode together; 6 and 7 are asked for while 1 to 5 are still running.
    pinned.adopt(1, versions[1].items())
    run(pinned)
    finished, together = [], []
    for version in range(1, 8):
        if version > 1:
            pinned.adopt(version, versions[version].items())
        pinned.submit(same_prompt(version, num_completions=8, max_tokens=30))
        finished += pinned.step()
    assert registered(pinned) >= {row.pinned.request.lora_int_id for row in pinned._rows.values()}
    while pinned.num_unfinished:
        before = {name: len(row.tokens) for name, row in pinned._rows.items()}
        finished += pinned.step()
        together.append(sampled_versions(pinned, before))
    assert max(map(len, together)) == MAX_STALENESS + 1
    assert any(7 in some for some in together)
    first_of_7 = next(i for i, some in enumerate(together) if 7 in some)
    assert first_of_7 > 10  # it waited for a whole version to end
    assert len(finished) == 56
    for completion in finished:
        version = completion.request_id
        assert completion.version_spans == (VersionSpan(version, 0, len(completion.tokens)),)
        wanted = expected(version, same_prompt(version), completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, wanted, atol=ATOL)


def test_a_version_of_another_epoch_under_the_same_number_is_another_adapter(
    pinned, versions, expected
):
    adopted = ((5, 5), (5, 2), (3, 3))  # and a lower one
    finished = []
    for request_id, (name, weights) in enumerate(adopted):
        pinned.adopt(name, versions[weights].items())
        pinned.submit(same_prompt(request_id, max_tokens=30))
        finished += pinned.step()
    finished += run(pinned).values()
    assert len(finished) == 9
    for completion in finished:
        name, weights = adopted[completion.request_id]
        assert {span.version for span in completion.version_spans} == {name}
        wanted = expected(weights, same_prompt(completion.request_id), completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, wanted, atol=ATOL)


def test_an_aborted_completion_gives_its_version_free_and_the_others_go_on(
    pinned, versions, expected
):
    pinned.adopt(1, versions[1].items())
    run(pinned)
    pinned.submit(same_prompt(0, num_completions=8, max_tokens=30))
    pinned.step()
    pinned.adopt(2, versions[2].items())
    pinned.submit(same_prompt(1, num_completions=8, max_tokens=30))
    finished = [c for _ in range(3) for c in pinned.step()]
    aborted = pinned.abort(0)
    assert aborted
    assert all({s.version for s in c.version_spans} == {1} for c in aborted)
    pinned.adopt(3, versions[3].items())
    assert len(registered(pinned)) == 2
    finished += run(pinned).values()
    for completion in (c for c in finished if c.request_id == 1):
        wanted = expected(2, same_prompt(1), completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, wanted, atol=ATOL)
