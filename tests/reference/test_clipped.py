"""clipped_loss against the scalar restatement and the textbook table."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.clipped import clipped_loss
from asyncrl.algo.tokens import TokenBatch
from tests.reference import scalar_loss
from tests.reference.scalar_loss import Token

SETTINGS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "tis_cap": 2.0}

garbage = st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
logprob = st.floats(-30, 0)
ratio = st.one_of(st.floats(-60, 60), st.floats(-1, 1), st.just(0.0))


@st.composite
def trained_token(draw):
    proximal = draw(logprob)
    behaviour = draw(
        st.one_of(ratio.map(lambda y: proximal - y), garbage.filter(lambda v: v != 1e30))
    )
    return Token(
        logprob=proximal + draw(ratio),
        proximal=proximal,
        behaviour=behaviour,
        advantage=draw(st.one_of(st.floats(-5, 5), st.just(0.0))),
        trained=True,
    )


hole = st.builds(Token, garbage, garbage, garbage, garbage, st.just(False))


def batch_of(tokens: list[Token]) -> TokenBatch:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(t, name) for t in tokens], dtype=torch.float64)

    return TokenBatch(
        logprobs=column("logprob").requires_grad_(),
        proximal_logprobs=column("proximal"),
        behaviour_logprobs=column("behaviour"),
        advantages=column("advantage"),
        completion_mask=torch.tensor([t.trained for t in tokens], dtype=torch.bool),
        staleness=torch.zeros(len(tokens), dtype=torch.int32),
    )


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.one_of(trained_token(), hole), min_size=1, max_size=12),
    extra=st.integers(1, 5),
    clip_low=st.floats(0.05, 0.9),
    clip_high=st.floats(0.05, 2.0),
    dual_clip=st.floats(3.1, 6.0),
    tis_cap=st.floats(0.5, 5.0),
)
def test_loss_and_gradient_equal_the_scalar_loop(tokens, extra, **bounds):
    num_tokens = len(tokens) + extra
    expected, slopes = scalar_loss.clipped(tokens, num_tokens=num_tokens, **bounds)
    batch = batch_of(tokens)
    loss, sums = clipped_loss(batch, num_tokens=num_tokens, **bounds)
    loss.backward()
    # e^20 * 5 is the largest value, so agreement is relative there.
    assert loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert batch.logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-10, abs=1e-10)
    assert sums["loss/policy"].item() == pytest.approx(expected * num_tokens, rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.one_of(trained_token(), hole), min_size=1, max_size=12), data=st.data())
def test_micro_batch_losses_add_up_to_the_whole(tokens, data):
    cut = data.draw(st.integers(0, len(tokens)))
    whole, _ = clipped_loss(batch_of(tokens), num_tokens=len(tokens), **SETTINGS)
    parts = [
        clipped_loss(batch_of(part), num_tokens=len(tokens), **SETTINGS)[0].item()
        for part in (tokens[:cut], tokens[cut:])
    ]
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("num_holes", [0, 3])
def test_an_empty_mask_gives_zero_with_a_graph(num_holes):
    holes = [Token(math.nan, math.nan, math.inf, math.nan, False)] * num_holes
    batch = batch_of(holes)
    loss, sums = clipped_loss(batch, num_tokens=7, **SETTINGS)
    loss.backward()
    assert loss.item() == 0.0
    assert batch.logprobs.grad.tolist() == [0.0] * num_holes
    assert {value.item() for value in sums.values()} == {0.0}


def test_zero_counted_tokens_are_refused():
    with pytest.raises(ValueError, match="num_tokens"):
        clipped_loss(batch_of([]), num_tokens=0, **SETTINGS)


# F007, clip 0.2 on both sides. loss = -min(rA, clip(r)A); gradient in log pi = -rA unless clipped.
TEXTBOOK = [
    # ratio, A, loss, gradient
    (1.5, +1, -1.2, 0.0),
    (1.5, -1, 1.5, 1.5),
    (0.5, +1, -0.5, -0.5),
    (0.5, -1, 0.8, 0.0),
    # Dual clip at 3: the loss of a negative advantage stops growing.
    (4.0, -1, 3.0, 0.0),
    (4.0, +1, -1.2, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), TEXTBOOK)
def test_one_token_equals_the_textbook_table(ratio, advantage, loss, gradient):
    batch = batch_of([Token(-1 + math.log(ratio), -1, -1, advantage, True)])
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "tis_cap": 2.0}
    value, _ = clipped_loss(batch, num_tokens=1, **bounds)
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert batch.logprobs.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_a_step_raises_the_rewarded_arm():
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    batch = TokenBatch(
        logprobs=logprobs,
        proximal_logprobs=logprobs.detach(),
        behaviour_logprobs=logprobs.detach(),
        advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
        completion_mask=torch.tensor([True, True]),
        staleness=torch.zeros(2, dtype=torch.int32),
    )
    clipped_loss(batch, num_tokens=2, **SETTINGS)[0].backward()
    # Gradient of (log p0 - log p1) / 2 is (1/2, -1/2), and the loss is its negative.
    assert logits.grad.tolist() == pytest.approx([-0.5, 0.5])


# pi = 0.3, A = 2. Below the cap a weight with a gradient but a ratio without one would give the same
# gradient, w r = pi / mu; above the cap it would give 0.
@pytest.mark.parametrize(("mu", "weight"), [(0.2, 1.5), (0.1, 2.0)])
def test_the_weight_is_constant_even_when_the_proximal_policy_is_this_pass(mu, weight):
    logprobs = torch.tensor([math.log(0.3)], dtype=torch.float64, requires_grad=True)
    batch = TokenBatch(
        logprobs=logprobs,
        proximal_logprobs=logprobs,
        behaviour_logprobs=torch.tensor([math.log(mu)], dtype=torch.float64),
        advantages=torch.tensor([2.0], dtype=torch.float64),
        completion_mask=torch.tensor([True]),
        staleness=torch.zeros(1, dtype=torch.int32),
    )
    loss, sums = clipped_loss(batch, num_tokens=1, **SETTINGS)
    loss.backward()
    assert loss.item() == pytest.approx(-weight * 2.0)
    assert logprobs.grad.item() == pytest.approx(-weight * 2.0)
    assert sums["tis/weight"].item() == pytest.approx(weight)


def test_what_was_clipped_truncated_and_refused_is_counted():
    tokens = [
        Token(-1 + math.log(1.5), -1, -1, +1, True),  # clipped high
        Token(-1 + math.log(1.5), -1, -1, -1, True),  # unclipped
        Token(-1 + math.log(0.5), -1, -1, -1, True),  # clipped low
        Token(-1 + math.log(4.0), -1, -1, -1, True),  # dual clip
        Token(-1, -1, -1 - math.log(5.0), +1, True),  # weight 5, truncated at 2
        Token(-1, -1, math.nan, +1, True),  # not finite
        Token(-1, -1, -26.0, 0, True),  # log weight 25: clamped, truncated
        Token(-1, -1, -26.0, +9, False),
    ]
    _, sums = clipped_loss(batch_of(tokens), num_tokens=8, **SETTINGS)
    assert {name: value.item() for name, value in sums.items() if name != "loss/policy"} == {
        "ratio/clipped_high": 1,
        "ratio/clipped_low": 1,
        "ratio/dual_clipped": 1,
        "tis/weight": pytest.approx(4 * 1.0 + 2.0 + 0.0 + 2.0),
        "tis/truncated": 2,
        "mismatch/nonfinite": 1,
        "mismatch/clamped": 1,
    }


def test_a_masked_rollout_changes_nothing_but_the_given_denominator():
    # F005: N is given, so four rollouts with one masked equal the three alone.
    three = [Token(-1.0, -1.1, -1.3, a, True) for a in (1.0, -0.5, 0.2)]
    masked = Token(-2.0, -2.0, -9.0, 4.0, False)
    expected, _ = clipped_loss(batch_of(three), num_tokens=3, **SETTINGS)
    found, _ = clipped_loss(batch_of([*three, masked]), num_tokens=3, **SETTINGS)
    assert found.item() == pytest.approx(expected.item(), rel=1e-14)
