"""Every loss x aggregation x correction against the scalar loops: value, gradient, cuts, guards."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo import AGGREGATIONS, LOSSES
from asyncrl.algo.corrections import correct
from asyncrl.config.correction import CORRECTIONS
from tests.reference import scalar_corrections, scalar_loss
from tests.reference.batches import batch_of, completions, num_trained, scales
from tests.reference.scalar_corrections import Rules, Sampled
from tests.reference.scalar_loss import Token

PPO = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
VARIANTS = [
    ("clipped", PPO),
    ("clipped", {"clip_low": 0.5, "clip_high": 1.5, "dual_clip": 4.0}),
    ("behaviour_clipped", PPO),
    ("reinforce", {}),
    ("cispo", {"floor": 0.0, "cap": 5.0, "anchor": "proximal"}),
    ("cispo", {"floor": 0.7, "cap": 1.3, "anchor": "behaviour"}),
    ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "token_level": False}),
    ("gspo", {"clip_low": 0.3, "clip_high": 0.9, "token_level": False}),
    ("gspo", {"clip_low": 0.3, "clip_high": 0.9, "token_level": True}),
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    ("dppo", {"divergence": "tv", "max_fall": 0.2, "max_rise": 0.3, "cap": 20.0, "anchor": "behaviour"}),
    ("dppo", {"divergence": "tv", "max_fall": 0.02, "max_rise": 0.01, "cap": 2.0, "anchor": "proximal"}),
    ("dppo", {"divergence": "kl", "max_fall": 0.05, "max_rise": 0.1, "cap": 20.0, "anchor": "behaviour"}),
    ("topr", {"cap": 1.0}),
    ("m2po", {"budget": 0.04}),
    ("m2po", {"budget": 3.0}),
    ("squared_log_ratio", {"beta": 0.1}),
]  # fmt: skip
NAMES = [f"{kind}-{index}" for index, (kind, _) in enumerate(VARIANTS)]
every_loss = pytest.mark.parametrize(("kind", "settings_"), VARIANTS, ids=NAMES)
PROMPTS = [0, 0, 1, 1]


def run(kind, settings_, tokens, *, aggregation="token_mean", cap=None, dtype=torch.float64):
    """Loss, gradient, and sums of one micro-batch that holds the whole update."""
    batch = batch_of(
        tokens, scale=scales(tokens, aggregation, prompts=PROMPTS), tis_cap=cap, dtype=dtype
    )
    num_tokens = max(1, num_trained(tokens))
    loss, sums = LOSSES[kind](batch, num_tokens=num_tokens, **settings_)
    loss.backward()
    return loss.item(), batch.logprobs.grad.tolist(), sums


def assert_equals_reference(found, expected, *, tolerance):
    """Loss relative to the sum of |terms|; gradients relative to the largest."""
    loss, gradient, sums = found
    wanted, slopes, magnitude = expected
    assert all(map(math.isfinite, [loss, *gradient])), (loss, gradient)
    assert all(value.isfinite() for value in sums.values())
    assert abs(loss - wanted) <= tolerance * magnitude + 1e-300
    largest = max(map(abs, slopes))
    worst = max(abs(g - s) for g, s in zip(gradient, slopes, strict=True))
    assert worst <= tolerance * largest + 1e-300


@every_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=40, deadline=None)
@given(tokens=completions(), cap=st.sampled_from([None, 2.0, 0.5]))
def test_value_and_gradient_equal_the_scalar_loop(kind, settings_, aggregation, tokens, cap):
    expected = scalar_loss.evaluate(
        kind, tokens, settings=settings_, aggregation=aggregation, prompts=PROMPTS, tis_cap=cap
    )
    found = run(kind, settings_, tokens, aggregation=aggregation, cap=cap)
    assert_equals_reference(found, expected, tolerance=1e-9)
    # What is logged is N times the loss, and N counts every trained token.
    num_tokens = max(1, num_trained(tokens))
    assert found[2]["loss/policy"].item() == pytest.approx(found[0] * num_tokens, rel=1e-12)
    refused = sum(t.trained and not math.isfinite(t.behaviour) for t in tokens)
    assert found[2]["mismatch/nonfinite"].item() == refused


@every_loss
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_loss_with_every_named_correction_equals_the_scalar_loops(
    kind, settings_, correction
):
    """Also pairs that the configuration refuses: the functions do not know each other."""
    asked = {name: value for name, value in CORRECTIONS[correction].items() if value}
    for seed in range(6):
        tokens = random_tokens(seed, spread=0.4)
        weights = slow_weights(tokens, Rules(**asked))
        for aggregation in AGGREGATIONS:
            expected = scalar_loss.evaluate(
                kind, tokens, settings=settings_, aggregation=aggregation, prompts=PROMPTS,
                weights=weights,
            )  # fmt: skip
            batch = batch_of(tokens, scale=scales(tokens, aggregation, prompts=PROMPTS))
            batch = batch._replace(behaviour_weights=correct(batch, **asked).weights)
            loss, sums = LOSSES[kind](batch, num_tokens=num_trained(tokens), **settings_)
            loss.backward()
            found = loss.item(), batch.logprobs.grad.tolist(), sums
            assert_equals_reference(found, expected, tolerance=1e-9)


def slow_weights(tokens, rules):
    """The scalar correction, completion by completion."""
    found = [0.0] * len(tokens)
    for sequence in {token.sequence for token in tokens}:
        where = [t for t, token in enumerate(tokens) if token.sequence == sequence]
        sampled = [
            Sampled(tokens[t].proximal, tokens[t].behaviour, tokens[t].trained, tokens[t].advantage)
            for t in where
        ]
        for t, weight in zip(where, scalar_corrections.weights(sampled, rules), strict=True):
            found[t] = weight
    return found


def random_tokens(seed, *, spread):
    """Two to four completions of up to 40 tokens, rounded to float32."""
    generator = random.Random(seed)

    def rounded(value):
        return torch.tensor(min(0.0, value), dtype=torch.float32).item()

    tokens = []
    for sequence in range(generator.randint(2, 4)):
        for _ in range(generator.choice([1, 7, 40])):
            if generator.random() < 0.1:
                tokens.append(Token(math.nan, math.inf, math.nan, math.nan, False, sequence))
                continue
            proximal = -generator.expovariate(0.5)
            behaviour = rounded(proximal + generator.gauss(0, spread))
            tokens.append(
                Token(
                    rounded(proximal + generator.gauss(0, spread)),
                    rounded(proximal),
                    math.nan if generator.random() < 0.05 else behaviour,
                    torch.tensor(generator.gauss(0, 1), dtype=torch.float32).item(),
                    True,
                    sequence,
                )
            )
    return tokens


@every_loss
@pytest.mark.parametrize("spread", [1e-3, 0.3, 8.0])
def test_float32_agrees_with_the_scalar_loop(kind, settings_, spread):
    for seed in range(12):
        tokens = random_tokens(seed, spread=spread)
        for aggregation in AGGREGATIONS:
            expected = scalar_loss.evaluate(
                kind, tokens, settings=settings_, aggregation=aggregation, prompts=PROMPTS,
                tis_cap=2.0,
            )  # fmt: skip
            found = run(
                kind, settings_, tokens, aggregation=aggregation, cap=2.0, dtype=torch.float32
            )
            assert_equals_reference(found, expected, tolerance=2e-4)


@every_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=15, deadline=None)
@given(tokens=completions(), parts=st.sampled_from([2, 4]))
def test_micro_batches_add_up_to_the_whole(kind, settings_, aggregation, tokens, parts):
    # F001.
    whole, gradient, _ = run(kind, settings_, tokens, aggregation=aggregation, cap=2.0)
    scale = scales(tokens, aggregation, prompts=PROMPTS)
    total, cut_gradient, magnitude = 0.0, [0.0] * len(tokens), 0.0
    for part in range(parts):
        inside = [i for i, token in enumerate(tokens) if token.sequence % parts == part]
        batch = batch_of([tokens[i] for i in inside], scale=scale, tis_cap=2.0)
        loss, _ = LOSSES[kind](batch, num_tokens=max(1, num_trained(tokens)), **settings_)
        loss.backward()
        total, magnitude = total + loss.item(), magnitude + abs(loss.item())
        for i, slope in zip(inside, batch.logprobs.grad.tolist(), strict=True):
            cut_gradient[i] = slope
    # The sum of losses may cancel; its parts bound the rounding only roughly.
    assert total == pytest.approx(whole, rel=1e-9, abs=1e-9 * (magnitude + 1))
    largest = max(map(abs, gradient))
    assert cut_gradient == pytest.approx(gradient, rel=1e-9, abs=1e-12 * largest)


@every_loss
@pytest.mark.parametrize("num_holes", [0, 3])
def test_an_empty_mask_gives_zero_with_a_graph(kind, settings_, num_holes):
    batch = batch_of([Token(math.nan, math.nan, math.inf, math.nan, False)] * num_holes)
    loss, sums = LOSSES[kind](batch, num_tokens=7, **settings_)
    loss.backward()
    assert loss.item() == 0.0
    assert batch.logprobs.grad.tolist() == [0.0] * num_holes
    assert {value.item() for value in sums.values()} == {0.0}


@every_loss
@pytest.mark.parametrize("field", ["logprobs", "advantages"])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_nan_of_the_learner_is_never_hidden_by_a_mask(kind, settings_, field, place):
    tokens = [Token(-1.0, -1.0, -1.0 - 0.1 * i, 1.0, True, i // 3) for i in range(5)]
    batch = batch_of(tokens)
    values = getattr(batch, field).detach().clone()
    values[place] = math.nan
    batch = batch._replace(**{field: values.requires_grad_(field == "logprobs")})
    loss, sums = LOSSES[kind](batch, num_tokens=5, **settings_)
    assert math.isnan(loss.item())
    assert math.isnan(sums["loss/policy"].item())


@every_loss
def test_zero_counted_tokens_are_refused(kind, settings_):
    # F016.
    with pytest.raises(ValueError, match="num_tokens"):
        LOSSES[kind](batch_of([]), num_tokens=0, **settings_)


@every_loss
def test_only_the_current_policy_has_a_gradient(kind, settings_):
    tokens = random_tokens(3, spread=0.3)
    batch = batch_of(tokens)
    leaves = {
        name: getattr(batch, name).clone().requires_grad_()
        for name in (
            "proximal_logprobs", "behaviour_logprobs", "advantages", "behaviour_weights", "scale",
        )
    }  # fmt: skip
    loss, _ = LOSSES[kind](batch._replace(**leaves), num_tokens=9, **settings_)
    loss.backward()
    assert batch.logprobs.grad.abs().max() > 0
    assert {name: leaf.grad for name, leaf in leaves.items()} == dict.fromkeys(leaves)


@every_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_masked_completion_changes_nothing(kind, settings_, aggregation):
    # F005: three completions and a fourth that trains no token.
    three = [
        Token(-1.0, -1.1, -1.05, a, True, s)
        for s, a in ((0, 1.0), (0, 1.0), (1, -0.5), (2, 0.2), (2, 0.2), (2, 0.2))
    ]
    masked = [Token(-2.0, -2.5, -9.0, 4.0, False, 3)] * 2
    expected, gradient, _ = run(kind, settings_, three, aggregation=aggregation)
    found, with_masked, _ = run(kind, settings_, [*three, *masked], aggregation=aggregation)
    assert found == pytest.approx(expected, rel=1e-14)
    assert with_masked == pytest.approx([*gradient, 0.0, 0.0], rel=1e-14)


@every_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_rejected_completion_stays_in_the_denominator(kind, settings_, aggregation):
    # Weight 0 takes its terms out and nothing else: those of the others stay what they were.
    tokens = [
        Token(-1.0, -1.1, -1.05, a, True, s)
        for s, a in ((0, 1.0), (0, 1.0), (1, -0.5), (2, 0.2), (2, 0.2))
    ]
    _, gradient, _ = run(kind, settings_, tokens, aggregation=aggregation)
    batch = batch_of(tokens, scale=scales(tokens, aggregation, prompts=PROMPTS))
    weights = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    loss, _ = LOSSES[kind](batch._replace(behaviour_weights=weights), num_tokens=5, **settings_)
    loss.backward()
    wanted = [0.0, 0.0, *gradient[2:]]
    assert batch.logprobs.grad.tolist() == pytest.approx(wanted, rel=1e-14, abs=0)
