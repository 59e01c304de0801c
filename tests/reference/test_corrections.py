"""Off-policy corrections against the scalar restatement, and each named one on two tokens by hand."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.corrections import correct
from asyncrl.algo.tokens import TokenBatch
from asyncrl.config.correction import CORRECTIONS
from tests.reference import scalar_corrections as slow
from tests.reference.scalar_corrections import Rules, Sampled

garbage = st.sampled_from([math.nan, math.inf, -math.inf])
log_ratio = st.one_of(st.floats(-60, 60), st.floats(-1, 1), st.just(0.0))
bound = st.one_of(st.none(), st.floats(1e-3, 3.0))


@st.composite
def sampled(draw):
    if draw(st.integers(0, 4)) == 0:
        return Sampled(draw(garbage), draw(garbage), False, draw(garbage))
    proximal = draw(st.floats(-30, 0))
    behaviour = proximal - draw(log_ratio)
    if draw(st.integers(0, 9)) == 0:
        behaviour = draw(garbage)
    return Sampled(proximal, behaviour, True, draw(st.floats(-2, 2)))


completions = st.lists(st.lists(sampled(), min_size=1, max_size=5), min_size=1, max_size=4)

rules = st.builds(
    Rules,
    weight=st.sampled_from(["none", "token", "sequence"]),
    low=st.one_of(st.none(), st.floats(0.01, 0.4)),
    cap=st.one_of(st.none(), st.floats(0.5, 5.0)),
    mask_low=st.one_of(st.none(), st.floats(0.01, 0.9)),
    mask_high=st.one_of(st.none(), st.floats(1.1, 50.0)),
    reject=st.sampled_from(["none", "product", "geometric", "k3"]),
    reject_low=st.one_of(st.none(), st.floats(0.01, 0.9)),
    reject_high=st.one_of(st.none(), st.floats(0.01, 5.0)),
    veto=st.booleans(),
    opsm_delta=st.one_of(st.none(), st.floats(1e-4, 0.5)),
)


def batch_of(completions, *, dtype=torch.float64, order=None):
    tokens = [token for completion in completions for token in completion]
    sequence = [index for index, completion in enumerate(completions) for _ in completion]
    order = list(range(len(tokens))) if order is None else order

    def column(name):
        return torch.tensor([getattr(tokens[i], name) for i in order], dtype=dtype)

    return TokenBatch(
        logprobs=column("proximal").requires_grad_(),
        proximal_logprobs=column("proximal").requires_grad_(),
        behaviour_logprobs=column("behaviour"),
        advantages=column("advantage"),
        completion_mask=torch.tensor([tokens[i].trained for i in order], dtype=torch.bool),
        staleness=torch.zeros(len(tokens), dtype=torch.int32),
        sequence=torch.tensor([sequence[i] for i in order], dtype=torch.int64),
        behaviour_weights=torch.full((len(tokens),), math.nan, dtype=dtype),
        scale=torch.full((len(tokens),), math.nan, dtype=dtype),
    )


def settings_of(rules):
    return {name: value for name, value in asdict(rules).items() if value is not None}


@settings(max_examples=500)
@given(completions=completions, rules=rules, data=st.data())
def test_weights_equal_the_scalar_loop_in_any_order_of_tokens(completions, rules, data):
    expected = [w for completion in completions for w in slow.weights(completion, rules)]
    order = data.draw(st.permutations(range(len(expected))))
    found = correct(batch_of(completions, order=order), **settings_of(rules))
    assert found.weights.tolist() == pytest.approx([expected[i] for i in order], rel=1e-12)
    assert found.sums["correction/weight"].item() == pytest.approx(sum(expected), rel=1e-12)
    reasons = [slow.verdict(completion, rules) for completion in completions]
    for name in ("rejected", "vetoed", "opsm"):
        count = found.sums[f"correction/{name}_sequences"].item()
        assert count == sum(name in reason for reason in reasons)


@settings(max_examples=100)
@given(completions=completions, rules=rules, data=st.data())
def test_micro_batches_of_whole_completions_add_up(completions, rules, data):
    cut = data.draw(st.integers(1, len(completions)))
    whole = correct(batch_of(completions), **settings_of(rules))
    parts = [
        correct(batch_of(part), **settings_of(rules))
        for part in (completions[:cut], completions[cut:])
    ]
    assert torch.cat([part.weights for part in parts]).tolist() == whole.weights.tolist()
    for name, total in whole.sums.items():
        found = sum(part.sums[name].item() for part in parts)
        assert found == pytest.approx(total.item(), rel=1e-12)


@given(completions=completions, rules=rules)
def test_weights_are_constant_even_when_the_proximal_policy_is_this_pass(completions, rules):
    found = correct(batch_of(completions), **settings_of(rules))
    assert not found.weights.requires_grad
    assert not any(total.requires_grad for total in found.sums.values())


@given(rules=rules, num_holes=st.integers(0, 3))
def test_without_tokens_everything_is_0(rules, num_holes):
    holes = [[Sampled(math.nan, math.inf, False, math.nan)]] * num_holes
    found = correct(batch_of(holes), **settings_of(rules))
    assert found.weights.tolist() == [0.0] * num_holes
    assert {total.item() for total in found.sums.values()} == {0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_learners_logprob_that_is_not_finite_is_not_hidden_by_a_weight(bad):
    # The step must see it and be skipped: a dropped token would be trained around silently.
    tokens = [Sampled(bad, -1.0, True), Sampled(-1.0, -1.0, True)]
    found = correct(batch_of([tokens]), weight="token")
    assert found.weights[0].item() != 0.0


LN2 = math.log(2.0)
# pi_prox / mu is 4 and 1/8 (product 1/2, geometric mean 0.7071, k3 = (4 - 1 - ln 4 + 1/8 - 1 + ln 8)/2
# = 1.4091); A = -1, so OPSM asks for mean(-y) = ln 2 / 2 = 0.3466 nats.
PAIR = [Sampled(-1.0, -1.0 - 2 * LN2, True, -1.0), Sampled(-4.0, -4.0 + 3 * LN2, True, -1.0)]
BY_HAND = {
    "none": [1.0, 1.0],
    "token_tis": [2.0, 0.125],
    "token_tis_two_sided": [4.0, 0.5],
    "sequence_tis": [0.5, 0.5],
    "icepop": [4.0, 0.0],
    "geometric": [0.0, 0.0],
    "k3": [0.0, 0.0],
    "opsm": [0.0, 0.0],
    "veto": [2.0, 0.125],
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_each_named_correction_equals_its_formula_on_two_tokens(name):
    # F003
    found = correct(batch_of([PAIR]), **CORRECTIONS[name])
    assert found.weights.tolist() == pytest.approx(BY_HAND[name], rel=1e-12)


# Close to the sampler, all but the first leave token TIS: [1.0202, 0.9802] for y = +-0.02.
NEAR = [Sampled(-1.0, -1.02, True, 1.0), Sampled(-1.0, -0.98, True, 1.0)]


@pytest.mark.parametrize("name", [n for n in CORRECTIONS if n not in ("none", "sequence_tis")])
def test_near_the_sampler_only_the_token_weight_is_left(name):
    found = correct(batch_of([NEAR]), **CORRECTIONS[name])
    assert found.weights.tolist() == pytest.approx([math.exp(0.02), math.exp(-0.02)], rel=1e-12)


@pytest.mark.parametrize(
    ("log_ratio", "kept"),
    [
        (-9.2, True),
        (-9.22, False),
        (4.6, True),
        (4.61, False),
    ],  # ln 1e-4 = -9.2103, ln 100 = 4.6052
)
def test_the_veto_drops_the_whole_completion_and_no_other(log_ratio, kept):
    odd = [Sampled(-1.0, -1.0, True), Sampled(-10.0, -10.0 - log_ratio, True)]
    found = correct(batch_of([odd, NEAR]), veto=True)
    assert found.weights.tolist() == [float(kept), float(kept), 1.0, 1.0]
    assert found.sums["correction/vetoed_sequences"].item() == (not kept)


def test_opsm_spares_what_is_rewarded_and_what_became_likelier():
    def completion(log_ratio, advantage):
        return [Sampled(-2.0, -2.0 - log_ratio, True, advantage)] * 2

    cases = [completion(-0.3, -1.0), completion(-0.3, 1.0), completion(0.3, -1.0)]
    found = correct(batch_of(cases), opsm_delta=0.1)
    assert found.weights.tolist() == [0, 0, 1, 1, 1, 1]


def test_the_sum_of_a_sequence_is_clamped_not_its_terms():
    # 30 - 29 = 1 nat; terms clamped first would give 20 - 20 = 0.
    tokens = [Sampled(-1.0, -31.0, True), Sampled(-30.0, -1.0, True)]
    found = correct(batch_of([tokens]), weight="sequence")
    assert found.weights.tolist() == pytest.approx([math.e, math.e])
    assert found.sums["mismatch/clamped"].item() == 2


def test_a_long_completion_of_small_differences_keeps_its_token_weight_and_loses_its_product():
    # F006: y = -0.002 over 10,000 tokens: the product is e^-20, the geometric mean e^-0.002.
    long = [Sampled(-1.002, -1.0, True)] * 10_000
    short = long[:10]
    batch = batch_of([long, short], dtype=torch.float32)
    token = correct(batch, **CORRECTIONS["token_tis"]).weights
    assert token.mean().item() == pytest.approx(math.exp(-0.002), rel=1e-5)
    whole = correct(batch, **CORRECTIONS["sequence_tis"]).weights
    # float32 holds 1.002 - 1 to 3e-5 of it, and the sum multiplies that: 20 * 3e-5 = 6e-4.
    assert whole[0].item() == pytest.approx(math.exp(-20), rel=2e-3)
    assert whole[-1].item() == pytest.approx(math.exp(-0.02), rel=1e-5)
    assert correct(batch, **CORRECTIONS["geometric"]).weights.count_nonzero().item() == 10_010


def test_what_was_done_is_counted_by_reason():
    first = [
        Sampled(-1.0, -1.0 - math.log(8), True),  # 8: truncated at 2, above the mask's 5
        Sampled(-1.0, -1.0 + math.log(8), True),  # 1/8: raised to 1/2, below the mask's 1/4
        Sampled(-1.0, -1.0 - math.log(3), True),  # 3: truncated
        Sampled(-1.0, math.nan, True),  # weight 0
        Sampled(math.nan, math.nan, False),
    ]
    second = [Sampled(-1.0, -26.0, True)]  # 25 nats: clamped, truncated, above the mask, vetoed
    rules = {"weight": "token", "low": 0.5, "cap": 2.0, "mask_low": 0.25, "mask_high": 5.0}
    sums = correct(batch_of([first, second]), **rules, veto=True).sums
    assert {name: total.item() for name, total in sums.items()} == {
        "correction/weight": 2.0,
        "correction/truncated": 3,
        "correction/raised": 1,
        "correction/masked_low": 1,
        "correction/masked_high": 2,
        "correction/dropped": 4,
        "correction/sequences": 2,
        "correction/rejected_sequences": 0,
        "correction/vetoed_sequences": 1,
        "correction/opsm_sequences": 0,
        "mismatch/clamped": 1,
    }
