"""The default loss: the textbook table, the place of its weight, and what it counts."""

import math

import pytest
import torch

from asyncrl.algo.clipped import clipped_loss
from asyncrl.algo.corrections import correct
from asyncrl.algo.tokens import TokenBatch
from tests.reference.batches import batch_of
from tests.reference.scalar_loss import Token

SETTINGS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


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
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
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
        sequence=torch.arange(2),
        behaviour_weights=torch.ones(2, dtype=torch.float64),
        scale=torch.ones(2, dtype=torch.float64),
    )
    clipped_loss(batch, num_tokens=2, **SETTINGS)[0].backward()
    # Gradient of (log p0 - log p1) / 2 is (1/2, -1/2), and the loss is its negative.
    assert logits.grad.tolist() == pytest.approx([-0.5, 0.5])


# pi = 0.3, A = 2. Below the cap a weight with a gradient but a ratio without one would give the same
# gradient, w r = pi / mu; above the cap it would give 0.
@pytest.mark.parametrize(("mu", "weight"), [(0.2, 1.5), (0.1, 2.0)])
def test_the_weight_is_constant_even_when_the_proximal_policy_is_this_pass(mu, weight):
    logprobs = torch.tensor([math.log(0.3)], dtype=torch.float64, requires_grad=True)
    batch = batch_of([Token(math.log(0.3), 0.0, math.log(mu), 2.0, True)])
    batch = batch._replace(logprobs=logprobs, proximal_logprobs=logprobs)
    correction = correct(batch, weight="token", cap=2.0)
    batch = batch._replace(behaviour_weights=correction.weights)
    loss, _ = clipped_loss(batch, num_tokens=1, **SETTINGS)
    loss.backward()
    assert correction.weights.item() == pytest.approx(weight)
    assert loss.item() == pytest.approx(-weight * 2.0)
    assert logprobs.grad.item() == pytest.approx(-weight * 2.0)


# F003: r = 1.5 or 0.5, w = 2 and 0.25, clip 0.2, A = +-1: the weight multiplies what the clip has chosen.
# Inside the min it would choose: min(2 * 0.5, 0.8) = 0.8 is the clipped branch, with no gradient.
@pytest.mark.parametrize(
    ("ratio", "mu_ratio", "advantage", "loss", "gradient"),
    [
        (0.5, 2.0, +1, -2.0 * 0.5, -2.0 * 0.5),
        (1.5, 0.25, +1, -0.25 * 1.2, 0.0),
        (1.5, 0.25, -1, 0.25 * 1.5, 0.25 * 1.5),
        (0.5, 2.0, -1, 2.0 * 0.8, 0.0),
    ],
)
def test_the_weight_stands_outside_the_min(ratio, mu_ratio, advantage, loss, gradient):
    token = Token(-2 + math.log(ratio), -2, -2 - math.log(mu_ratio), advantage, True)
    batch = batch_of([token], tis_cap=3.0)
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    value, _ = clipped_loss(batch, num_tokens=1, **bounds)
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert batch.logprobs.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_what_was_clipped_truncated_and_refused_is_counted():
    tokens = [
        Token(-1 + math.log(1.5), -1, -1, +1, True),  # clipped high
        Token(-1 + math.log(1.5), -1, -1, -1, True),  # unclipped
        Token(-1 + math.log(0.5), -1, -1, -1, True),  # clipped low
        Token(-1 + math.log(4.0), -1, -1, -1, True),  # dual clip
        Token(-1, -1, -1 - math.log(5.0), +1, True),  # weight 5, truncated at 2
        Token(-1, -1, math.nan, +1, True),  # not finite
        Token(-1, -26, -26.0, 0, True),  # log-ratio 25: clamped
        Token(-1, -1, -26.0, +9, False),
    ]
    batch = batch_of(tokens)
    _, sums = clipped_loss(batch, num_tokens=8, **SETTINGS)
    assert {name: value.item() for name, value in sums.items() if name != "loss/policy"} == {
        "ratio/clipped_high": 1,
        "ratio/clipped_low": 1,
        "ratio/dual_clipped": 1,
        "ratio/clamped": 1,
        "mismatch/nonfinite": 1,
    }
