"""KL terms: against the scalar restatement, and against the exact gradient of a categorical's KL."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.corrections import correct
from asyncrl.algo.kl import kl_loss, kl_sums, with_kl_reward
from asyncrl.algo.reinforce import reinforce_loss
from asyncrl.algo.tokens import TokenBatch
from tests.reference import scalar_kl as slow
from tests.reference.scalar_kl import Referenced

garbage = st.sampled_from([math.nan, math.inf, -math.inf])
hole = st.builds(Referenced, garbage, garbage, garbage, st.just(False), garbage)
shift = st.one_of(st.floats(-60, 60), st.floats(-1, 1), st.just(0.0))


@st.composite
def token(draw):
    logprob = draw(st.floats(-30, 0))
    behaviour = draw(st.one_of(shift.map(lambda z: logprob - z), garbage))
    scale = draw(st.floats(0.1, 3.0))
    return Referenced(logprob, behaviour, logprob - draw(shift), True, scale)


tokens = st.lists(st.one_of(token(), hole), min_size=1, max_size=10)


def batch_of(tokens):
    def column(name):
        return torch.tensor([getattr(t, name) for t in tokens], dtype=torch.float64)

    return TokenBatch(
        logprobs=column("logprob").requires_grad_(),
        proximal_logprobs=column("logprob"),
        behaviour_logprobs=column("behaviour"),
        advantages=torch.zeros(len(tokens), dtype=torch.float64),
        completion_mask=torch.tensor([t.trained for t in tokens], dtype=torch.bool),
        staleness=torch.zeros(len(tokens), dtype=torch.int32),
        sequence=torch.zeros(len(tokens), dtype=torch.int64),
        behaviour_weights=torch.full((len(tokens),), math.nan, dtype=torch.float64),
        scale=column("scale"),
        reference_logprobs=column("reference"),
    )


@settings(max_examples=300)
@given(tokens=tokens, kind=st.sampled_from(["loss_k2", "loss_k3"]), extra=st.integers(0, 4))
def test_value_and_gradient_equal_the_scalar_loop(tokens, kind, extra):
    arguments = {"num_tokens": len(tokens) + extra, "kind": kind, "coefficient": 0.3}
    expected, slopes = slow.kl_term(tokens, **arguments)
    batch = batch_of(tokens)
    loss, sums = kl_loss(batch, **arguments)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert batch.logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    total = sums["kl/loss"].item()
    assert total == pytest.approx(expected * arguments["num_tokens"], rel=1e-9, abs=1e-12)


@given(tokens=tokens)
def test_monitored_estimates_are_weighted_sums_over_the_tokens_that_count(tokens):
    counted = [t for t in tokens if slow.weight(t) > 0]
    sums = kl_sums(batch_of(tokens))
    k1 = sum(slow.weight(t) * (t.logprob - t.reference) for t in counted)
    k3 = sum(slow.weight(t) * slow.k3(t.logprob - t.reference) for t in counted)
    assert sums["kl/k1"].item() == pytest.approx(k1, rel=1e-9, abs=1e-9)
    assert sums["kl/k3"].item() == pytest.approx(k3, rel=1e-9, abs=1e-9)


@given(tokens=tokens)
def test_the_reward_is_lowered_by_a_constant(tokens):
    batch = with_kl_reward(batch_of(tokens), coefficient=0.5)
    assert not batch.advantages.requires_grad
    expected = [-0.5 * (t.logprob - t.reference) if slow.weight(t) > 0 else 0.0 for t in tokens]
    assert batch.advantages.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_term_without_a_reference_is_refused():
    batch = batch_of([Referenced(-1.0, -1.0, -1.0)])._replace(reference_logprobs=None)
    with pytest.raises(ValueError, match="reference_logprobs"):
        kl_loss(batch, num_tokens=1, kind="loss_k2", coefficient=1.0)


# A categorical: pi trained, mu stale by a real difference (pi / mu from 0.4 to 2.9), and a reference.
PI = [0.5, 0.2, 0.1, 0.15, 0.05]
MU = [0.3, 0.25, 0.2, 0.0517, 0.1983]
REFERENCE = [0.1, 0.4, 0.2, 0.2, 0.1]


def toy(draws):
    """The batch of drawn tokens, and the logits behind its logprobs."""
    logits = torch.tensor(PI, dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(0)[draws]
    batch = TokenBatch(
        logprobs=logprobs,
        proximal_logprobs=logprobs.detach(),
        behaviour_logprobs=torch.tensor(MU, dtype=torch.float64).log()[draws],
        advantages=torch.zeros(len(draws), dtype=torch.float64),
        completion_mask=torch.ones(len(draws), dtype=torch.bool),
        staleness=torch.zeros(len(draws), dtype=torch.int32),
        sequence=torch.arange(len(draws)),
        behaviour_weights=torch.ones(len(draws), dtype=torch.float64),
        scale=torch.ones(len(draws), dtype=torch.float64),
        reference_logprobs=torch.tensor(REFERENCE, dtype=torch.float64).log()[draws],
    )
    return batch, logits


def exact_gradient():
    """d KL(pi || ref) / d logit_j = pi_j (u_j - KL), from the definition of the softmax."""
    ratios = [math.log(p / q) for p, q in zip(PI, REFERENCE, strict=True)]
    kl = sum(p * u for p, u in zip(PI, ratios, strict=True))
    slopes = [p * (u - kl) for p, u in zip(PI, ratios, strict=True)]
    return torch.tensor(slopes, dtype=torch.float64), kl


def gradient(kind, batch, logits, num_tokens):
    if kind == "reward_k1":
        weights = correct(batch, weight="token").weights  # no cap: nothing is truncated
        rewarded = with_kl_reward(batch._replace(behaviour_weights=weights), coefficient=1.0)
        loss, _ = reinforce_loss(rewarded, num_tokens=num_tokens)
    else:
        loss, _ = kl_loss(batch, num_tokens=num_tokens, kind=kind, coefficient=1.0)
    (found,) = torch.autograd.grad(loss, logits)
    return found


@pytest.mark.parametrize("kind", ["reward_k1", "loss_k2", "loss_k3"])
def test_the_expected_gradient_is_that_of_the_kl_whoever_sampled(kind):
    # Each token once, its probability under mu as its scale: the expectation without sampling.
    batch, logits = toy(torch.arange(5))
    batch = batch._replace(scale=torch.tensor(MU, dtype=torch.float64))
    found = gradient(kind, batch, logits, 1)
    torch.testing.assert_close(found, exact_gradient()[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["reward_k1", "loss_k2", "loss_k3"])
def test_a_million_draws_of_a_stale_sampler_give_the_gradient_within_two_per_cent(kind):
    # F009
    generator = torch.Generator().manual_seed(7)
    draws = torch.multinomial(torch.tensor(MU), 10**6, replacement=True, generator=generator)
    batch, logits = toy(draws)
    found = gradient(kind, batch, logits, len(draws))
    exact = exact_gradient()[0]
    assert float((found - exact).norm() / exact.norm()) < 0.02


def test_the_monitored_kl_is_unbiased_whoever_sampled():
    _, kl = exact_gradient()
    mu = torch.tensor(MU, dtype=torch.float64)
    for estimator in ("kl/k1", "kl/k3"):
        parts = [
            kl_sums(toy(torch.tensor([token]))[0])[estimator].item() for token in range(len(MU))
        ]
        assert (mu * torch.tensor(parts)).sum().item() == pytest.approx(kl)


def test_a_ratio_beyond_10_counts_as_10():
    tokens = [Referenced(math.log(0.5), math.log(0.5) - math.log(r), -1.0) for r in (9.0, 11.0)]
    batch = batch_of(tokens)
    kl_loss(batch, num_tokens=1, kind="loss_k2", coefficient=1.0)[0].backward()
    nine, ten = batch.logprobs.grad.tolist()
    assert ten / nine == pytest.approx(10 / 9)
