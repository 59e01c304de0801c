"""What sets each loss apart, by arithmetic on a few tokens; and the identities between them."""

import math
import random
from dataclasses import replace

import pytest
import torch

from asyncrl.algo import LOSSES
from asyncrl.algo.corrections import correct
from tests.reference.batches import batch_of
from tests.reference.scalar_loss import Token

CISPO = {"floor": 0.7, "cap": 5.0, "anchor": "proximal"}
GSPO = {"clip_low": 0.2, "clip_high": 0.2, "token_level": False}
SAPO = {"tau_positive": 1.0, "tau_negative": 1.05}
TV = {"divergence": "tv", "max_fall": 0.2, "max_rise": 0.2, "cap": 20.0, "anchor": "behaviour"}
KL = TV | {"divergence": "kl", "max_fall": 0.05, "max_rise": 0.05}
BEHAVIOUR_CLIPPED = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}


def near_prox(ratio, advantage, sequence=0):
    """A token of pi_theta / pi_prox = ratio, with mu somewhere else."""
    return Token(-3 + math.log(ratio), -3, -3.4, advantage, True, sequence)


def near_mu(p, q, advantage):
    """A token of pi_theta = p and mu = q, with pi_prox somewhere else."""
    return Token(math.log(p), math.log(0.33), math.log(q), advantage, True)


# (loss, settings, tokens, gradient of the sum of the tokens' losses)
TABLE = [
    # Every token keeps a gradient, of at least 0.7 and at most 5.
    ("cispo", CISPO, [near_prox(2.0, 1), near_prox(6.0, 1), near_prox(6.0, -1)], [-2, -5, 5]),
    ("cispo", CISPO, [near_prox(0.5, 1), near_prox(0.5, -2)], [-0.7, 1.4]),
    ("cispo", CISPO | {"anchor": "behaviour"}, [near_mu(0.6, 0.2, 1)], [-3]),
    ("reinforce", {}, [near_prox(7.0, 2), near_prox(0.1, -1)], [-2, 1]),
    ("behaviour_clipped", BEHAVIOUR_CLIPPED, [near_mu(0.3, 0.2, 1), near_mu(0.3, 0.2, -1)], [0, 1.5]),
    ("behaviour_clipped", BEHAVIOUR_CLIPPED, [near_mu(0.1, 0.2, 1), near_mu(0.1, 0.2, -1)], [-0.5, 0]),
    # One ratio for both: sqrt(1.5 / 1.5) = 1, though each alone would be clipped.
    ("gspo", GSPO, [near_prox(1.5, 1), near_prox(1 / 1.5, 1)], [-1, -1]),
    # sqrt(1.5 * 1) = 1.22 > 1.2: both are silent, for a negative advantage both pull.
    ("gspo", GSPO, [near_prox(1.5, 1), near_prox(1, 1)], [0, 0]),
    ("gspo", GSPO, [near_prox(1.5, -1), near_prox(1, -1)], [math.sqrt(1.5)] * 2),
    # The direct form spreads the mean advantage -1; the token form leaves each its own.
    ("gspo", GSPO, [near_prox(1, 1), near_prox(1, -3)], [1, 1]),
    ("gspo", GSPO | {"token_level": True}, [near_prox(1, 1), near_prox(1, -3)], [-1, 3]),
    # Another completion's ratio is its own.
    ("gspo", GSPO, [near_prox(1.5, 1, 0), near_prox(0.9, 1, 1)], [0, -0.9]),
    # At r = 1 PPO's gradient. At r = 2: 4 g (1 - g) r with g = sigmoid(tau).
    ("sapo", SAPO, [near_prox(1, 2), near_prox(1, -2)], [-2, 2]),
    ("sapo", SAPO, [near_prox(2, 1), near_prox(2, -1)], [-1.572896, 1.536220]),
    # Further away less: the larger tau of negative advantages decays faster.
    ("sapo", SAPO, [near_prox(5, 1), near_prox(5, -1)], [-0.353254, 0.291115]),
    # |p - q| 0.25 is masked only in the direction of A; 0.15 never.
    ("dppo", TV, [near_mu(0.75, 0.5, 1), near_mu(0.65, 0.5, 1)], [0, -1.3]),
    ("dppo", TV, [near_mu(0.75, 0.5, -1), near_mu(0.25, 0.5, -1)], [1.5, 0]),
    ("dppo", TV, [near_mu(0.25, 0.5, 1), near_mu(0.35, 0.5, -1)], [-0.5, 0.7]),
    # A rare token may grow a hundredfold, its pull capped at 20.
    ("dppo", TV, [near_mu(0.1, 0.001, 1)], [-20]),
    # 0.5 ln(0.5/0.65) + 0.5 ln(0.5/0.35) = 0.0472; with 0.66: 0.0540.
    ("dppo", KL, [near_mu(0.65, 0.5, 1), near_mu(0.66, 0.5, 1)], [-1.3, 0]),
    ("dppo", KL, [near_mu(0.35, 0.5, -1), near_mu(0.34, 0.5, -1)], [0.7, 0]),
    # 0.9 to 0.999 moves less than 0.2 in total variation, and 0.37 nats.
    ("dppo", KL, [near_mu(0.999, 0.9, 1)], [0]),
    # Ratio of the completion 0.5 * 0.5; good ones have weight 1 whatever it is.
    ("topr", {"cap": 1.0}, [near_mu(0.1, 0.2, -1), near_mu(0.3, 0.6, -1)], [0.25, 0.25]),
    ("topr", {"cap": 1.0}, [near_mu(0.1, 0.2, 1), near_mu(0.3, 0.6, 1)], [-1, -1]),
    ("topr", {"cap": 1.0}, [near_mu(0.4, 0.2, -1), near_mu(0.3, 0.2, -1)], [1, 1]),
    # Squares of 0.1, 0.3, 0.1 have mean 0.037 <= 0.04; of 0.1, 0.4, 0.1 mean 0.06: 0.4 leaves.
    (
        "m2po", {"budget": 0.04},
        [Token(-1 + z, -2, -1, 1, True) for z in (0.1, -0.3, 0.1)],
        [-math.exp(0.1), -math.exp(-0.3), -math.exp(0.1)],
    ),
    (
        "m2po", {"budget": 0.04},
        [Token(-1 + z, -2, -1, 1, True) for z in (0.1, -0.4, 0.1)],
        [-math.exp(0.1), 0, -math.exp(0.1)],
    ),
    # One token is always kept.
    (
        "m2po", {"budget": 0.04},
        [Token(-1, -2, -3, 1, True), Token(-1, -2, -4, 1, True)],
        [-math.exp(2), 0],
    ),
    # -A + beta z: pulled back without any advantage, and at rest at z = A / beta.
    (
        "squared_log_ratio", {"beta": 0.1},
        [Token(-1, -5, -1.5, 1, True), Token(-1, -5, -3, 0, True), Token(-1, -5, -11, 1, True)],
        [-0.95, 0.2, 0],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "tokens", "gradient"), TABLE)
def test_gradients_equal_the_table(kind, settings, tokens, gradient):
    batch = batch_of(tokens)
    loss, _ = LOSSES[kind](batch, num_tokens=1, **settings)
    loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", ["dppo", "m2po", "topr", "cispo"])
def test_what_was_masked_or_capped_is_counted(kind):
    settings, tokens, name, count = {
        "dppo": (TV, [near_mu(0.75, 0.5, 1), near_mu(0.25, 0.5, -1)], "ratio/masked", 2),
        "m2po": ({"budget": 0.04}, [near_mu(0.5, 0.2, 1)] * 3, "ratio/masked", 2),
        "topr": ({"cap": 1.0}, [near_mu(0.5, 0.2, -1)], "ratio/capped", 1),
        "cispo": (CISPO, [near_prox(6, 1), near_prox(6, 0)], "ratio/clipped_high", 2),
    }[kind]
    unreadable = Token(-1, -1, math.nan, -1, True)
    hole = Token(math.nan, math.nan, 0.0, math.nan, False)
    _, sums = LOSSES[kind](batch_of([*tokens, unreadable, hole]), num_tokens=9, **settings)
    assert sums[name].item() == count
    assert sums["mismatch/nonfinite"].item() == 1


def test_topr_at_equal_policies_clips_nothing():
    # Half of the bad completions lie above a ratio of 1 by a rounding: no sign of a step too large.
    tokens = [near_mu(0.5 + 1e-7, 0.5, -1), near_mu(0.5 - 1e-7, 0.5, -1)]
    tokens = [replace(token, sequence=i) for i, token in enumerate(tokens)]
    _, sums = LOSSES["topr"](batch_of(tokens), num_tokens=2, cap=1.0)
    assert sums["ratio/capped"].item() == 1
    assert "ratio/clipped_high" not in sums


def random_batch(seed=0, *, current_is_proximal=False):
    generator = random.Random(seed)
    tokens = []
    for sequence in range(4):
        advantage = generator.gauss(0, 1)
        for _ in range(generator.randint(1, 9)):
            proximal = -generator.expovariate(1.0)
            current = (
                proximal if current_is_proximal else min(0, proximal + generator.gauss(0, 0.4))
            )
            mu = min(0, proximal + generator.gauss(0, 0.8))
            tokens.append(Token(current, proximal, mu, advantage, True, sequence))
    return batch_of(tokens)


def gradient_of(kind, batch, **settings):
    loss, _ = LOSSES[kind](batch, num_tokens=10, **settings)
    return torch.autograd.grad(loss, batch.logprobs)[0]


def test_with_one_update_per_batch_losses_around_the_proximal_policy_are_one():
    # r = 1 everywhere: the clip and the gate are inert, whatever the correction says.
    batch = random_batch(current_is_proximal=True)
    batch = batch._replace(behaviour_weights=correct(batch, weight="token", cap=2.0).weights)
    wanted = gradient_of("reinforce", batch)
    assert wanted.abs().max() > 0
    for kind, settings in [
        ("clipped", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}),
        ("cispo", CISPO),
        ("sapo", SAPO),
        ("gspo", GSPO | {"token_level": True}),
        ("dppo", TV | {"anchor": "proximal"}),
    ]:
        torch.testing.assert_close(gradient_of(kind, batch, **settings), wanted)


def test_a_token_cap_turns_reinforce_into_aipo():
    # Which is CISPO around mu without a lower bound.
    batch = random_batch(current_is_proximal=True)
    weighted = batch._replace(behaviour_weights=correct(batch, weight="token", cap=1.5).weights)
    wanted = gradient_of("cispo", batch, floor=0.0, cap=1.5, anchor="behaviour")
    torch.testing.assert_close(gradient_of("reinforce", weighted), wanted)


def test_both_forms_of_gspo_agree_when_a_completion_has_one_advantage():
    batch = random_batch(5)
    direct = gradient_of("gspo", batch, **GSPO)
    assert direct.abs().max() > 0
    torch.testing.assert_close(gradient_of("gspo", batch, **GSPO | {"token_level": True}), direct)


def test_gspo_does_not_see_padding():
    tokens = [near_prox(1.5, 1), near_prox(1.1, 1)]
    hole = Token(math.nan, math.nan, math.nan, math.nan, False)
    wanted = gradient_of("gspo", batch_of(tokens), clip_low=0.2, clip_high=0.9, token_level=False)
    found = gradient_of(
        "gspo", batch_of([*tokens, *[hole] * 5]), clip_low=0.2, clip_high=0.9, token_level=False
    )
    assert found.tolist() == [*wanted.tolist(), *[0.0] * 5]


def test_a_loss_around_mu_ignores_the_proximal_policy_and_one_around_it_ignores_mu():
    batch = random_batch(1)
    elsewhere = torch.full_like(batch.logprobs, -2.0).detach()
    ppo = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    around_mu = [
        ("behaviour_clipped", ppo), ("dppo", TV), ("topr", {"cap": 1.0}), ("m2po", {"budget": 0.5}),
        ("squared_log_ratio", {"beta": 0.1}), ("cispo", CISPO | {"anchor": "behaviour"}),
    ]  # fmt: skip
    around_proximal = [
        ("clipped", ppo), ("gspo", GSPO), ("sapo", SAPO), ("cispo", CISPO),
        ("dppo", TV | {"anchor": "proximal"}),
    ]  # fmt: skip
    for losses, unread, read in [
        (around_mu, "proximal_logprobs", "behaviour_logprobs"),
        (around_proximal, "behaviour_logprobs", "proximal_logprobs"),
    ]:
        for kind, settings in losses:
            before = gradient_of(kind, batch, **settings)
            moved = gradient_of(kind, batch._replace(**{unread: elsewhere}), **settings)
            assert torch.equal(before, moved), kind
            moved = gradient_of(kind, batch._replace(**{read: elsewhere}), **settings)
            assert not torch.equal(before, moved), kind
