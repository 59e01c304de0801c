"""The learner's half of the canary, against one plain forward pass of transformers."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from asyncrl.config import RunConfig
from asyncrl.errors import NonFiniteLossError
from asyncrl.learner.model import Policy
from asyncrl.learner.probe import DENSE, PERIOD, Prober, fixed_tokens, sequence_logprobs
from tests.models import make_tiny_model
from tests.reference.stepping import load_policy
from tests.unit.test_ranks import start_two

VOCABULARY = 100


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=3)


def configure(path, **sections):
    tree = {"model": {"path": str(path)}, "task": {"kind": "repeat_letter"}, "seed": 7}
    return RunConfig.model_validate(tree | sections)


def plain_logprobs(path, tokens):
    given = torch.from_numpy(tokens).long()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path).eval()(given[None]).logits[0, :-1]
    table = torch.log_softmax(logits.float(), dim=-1)
    return table[torch.arange(len(given) - 1), given[1:]].numpy()


def test_both_columns_are_the_full_forward_pass_of_their_weights(path, tmp_path):
    other = make_tiny_model(tmp_path / "other", seed=4)
    prober = Prober.begin(load_policy(path), configure(path))
    policy = load_policy(other)
    probe = prober.probe(1, prober.score(policy, num_passed=1))
    tokens = np.array(probe.tokens, np.int32)
    assert len(tokens) == 64
    assert set(tokens.tolist()) <= set(range(VOCABULARY))
    np.testing.assert_allclose(probe.first_logprobs, plain_logprobs(path, tokens), atol=1e-5)
    np.testing.assert_allclose(probe.logprobs, plain_logprobs(other, tokens), atol=1e-5)
    assert not policy.training
    assert all(p.grad is None for p in policy.parameters())


def test_it_is_computed_for_the_first_versions_and_then_for_every_seventh(path):
    prober = Prober.begin(load_policy(path), configure(path))
    policy = load_policy(path)
    due = [n for n in range(30) if prober.score(policy, num_passed=n) is not None]
    assert (DENSE, PERIOD) == (4, 7)
    assert due == [0, 1, 2, 3, 4, 7, 14, 21, 28]
    # Whatever the stride in which a generator skips versions, 7 adoptions meet one of them (but for
    # strides of a multiple of 7, which are told apart by their start alone).
    for stride in (1, 2, 3, 4, 5, 6, 8, 9, 10):
        for start in range(PERIOD):
            assert any((start + i * stride) % PERIOD == 0 for i in range(PERIOD))
    undue = prober.probe(5, None)
    assert undue.logprobs is None
    assert undue.first_logprobs == tuple(prober.first_logprobs.tolist())


def test_the_sequence_is_the_runs_own_and_the_same_in_every_process(path):
    one, again = (fixed_tokens(VOCABULARY, seed=7, num_tokens=64) for _ in range(2))
    assert one.tolist() == again.tolist()
    assert one.tolist() != fixed_tokens(VOCABULARY, seed=8, num_tokens=64).tolist()
    assert one[:10].tolist() == fixed_tokens(VOCABULARY, seed=7, num_tokens=10).tolist()


@pytest.mark.parametrize(
    ("engine", "expected"),
    # vLLM has room for prompt + completion tokens and needs one for itself.
    [((8, 8), 15), ((512, 32), 64), ((1, 2), 2), ((1, 1), None)],
)
def test_it_fits_into_the_engines_context(path, engine, expected):
    section = {"max_prompt_tokens": engine[0], "max_completion_tokens": engine[1]}
    prober = Prober.begin(load_policy(path), configure(path, engine=section))
    assert (None if prober is None else len(prober.tokens)) == expected


def test_it_can_be_switched_off(path):
    config = configure(path, weights={"canary": False})
    assert Prober.begin(load_policy(path), config) is None


def test_weights_that_give_no_finite_logprobs_are_named(path):
    policy = load_policy(path)
    prober = Prober.begin(policy, configure(path))
    with torch.no_grad():
        next(policy.parameters())[0, 0] = torch.nan
    with pytest.raises(NonFiniteLossError, match="under version 3 are not finite"):
        prober.probe(3, prober.score(policy, num_passed=3))


def test_bfloat16_products_are_the_policys_own(path):
    """What is compared with an engine of the same type is not the float32 model."""
    device = torch.device("cpu")
    policy = Policy.load(path, device=device, compute_dtype=torch.bfloat16)
    tokens = fixed_tokens(VOCABULARY, seed=0, num_tokens=64)
    found = sequence_logprobs(policy, tokens)
    exact = plain_logprobs(path, tokens)
    assert found.dtype == torch.float32
    assert 1e-4 < np.abs(found.numpy() - exact).mean() < 0.05


@pytest.mark.process
def test_two_ranks_say_what_one_says_between_two_updates(path, tmp_path):
    """And what they train and save is unchanged by it (two_ranks.py compares)."""
    start_two("probe", path, tmp_path)
    tokens = fixed_tokens(VOCABULARY, seed=0, num_tokens=64)
    for rank in (0, 1):
        found = load_file(tmp_path / f"probes{rank}")
        np.testing.assert_allclose(found["before"], plain_logprobs(path, tokens), atol=1e-5)
        saved = tmp_path / "saved" / "version-000003"
        np.testing.assert_allclose(found["after"], plain_logprobs(saved, tokens), atol=1e-5)
        assert np.abs(found["after"] - found["before"]).mean() > 1e-3
