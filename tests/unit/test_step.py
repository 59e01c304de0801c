"""The optimizer step on a real (tiny) model, against gradients written out rollout by rollout."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GraniteConfig, MistralConfig

from asyncrl.algo import ADVANTAGES, LOSSES
from asyncrl.errors import ConfigError
from asyncrl.learner.batch import build_step
from asyncrl.learner.model import Policy, attention_mask, choose_dtype
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.step import Optimizer, train_step
from asyncrl.telemetry.trace import Tracer
from tests.models import make_tiny_model
from tests.reference.groups import group, random_groups, rollout

CPU = torch.device("cpu")
LOSS = partial(LOSSES["clipped"], clip_low=0.2, clip_high=0.28, dual_clip=3.0, tis_cap=2.0)
BETA1 = 0.9


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def load(path):
    return Policy.load(path, device=CPU, compute_dtype=torch.float32)


def make_optimizer(policy, **changes):
    arguments = {
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
        "beta1": BETA1,
        "beta2": 0.999,
        "max_grad_norm": 1e9,
        "num_warmup_steps": 0,
    }
    return Optimizer(policy, **(arguments | changes))


def pack(groups, **changes):
    arguments = {
        "version": 3,
        "max_staleness": 2,
        "advantage": ADVANTAGES["mean_std"],
        "share_prompts": True,
        "micro_batch_tokens": 256,
        "skip_zero_advantage": False,
    }
    return build_step(groups, **(arguments | changes))


def run(policy, optimizer, step, temperature=1.0):
    return train_step(
        policy,
        optimizer,
        step,
        loss=LOSS,
        temperature=temperature,
        ranks=Ranks(),
        tracer=Tracer(None, process="test"),
    )


def gradient_after_first_step(optimizer):
    """Adam's first moment is (1 - beta1) times the first gradient."""
    return {
        name: optimizer.adam.state[parameter]["exp_avg"] / (1 - BETA1)
        for name, parameter in optimizer.parameters.items()
    }


def snapshot(policy, optimizer):
    weights = {n: p.detach().clone() for n, p in policy.named_weights()}
    moments = {
        f"{name}/{key}": value.clone()
        for name, parameter in optimizer.parameters.items()
        for key, value in optimizer.adam.state.get(parameter, {}).items()
    }
    return weights | moments


def identical(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """[C] by the library's own forward pass over one sequence and a log-softmax of its logits."""
    sequence = torch.tensor([*prompt.tolist(), *completion.tolist()])
    logits = model(input_ids=sequence[None]).logits[0] / temperature
    table = logits.log_softmax(-1)[:-1]
    return table.gather(1, sequence[1:, None])[len(prompt) - 1 :, 0]


def reference_gradient(path, groups, temperature=1.0):
    """-1/N sum_t min(2, pi/mu) A_t grad log pi_t, one rollout at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    num_tokens = sum(item.num_completion_tokens for item in groups)
    for item in groups:
        scores = np.array([r.verdict.score for r in item.rollouts])
        if np.ptp(scores) == 0:
            continue
        advantages = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-4)
        for one, advantage in zip(item.rollouts, advantages, strict=True):
            logprobs = plain_logprobs(model, item.prompt_tokens, one.completion_tokens, temperature)
            mu = torch.from_numpy(one.behaviour_logprobs)
            weight = (logprobs.detach() - mu).exp().clamp(max=2.0)
            (-(weight * float(advantage) * logprobs).sum() / num_tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def unequal_groups():
    """F001: 5, 50, 7, 90, 3, 200, 11 and 64 trained tokens."""
    generator = np.random.default_rng(0)

    def one(length, score):
        tokens = generator.integers(0, 90, length)
        return rollout(
            tokens, score=score, versions=[2] * length, logprobs=-generator.uniform(1, 6, length)
        )

    return [
        group([5, 6, 7], [one(5, 0.0), one(50, 1.0), one(7, 1.0), one(90, 0.0)], group_id=0),
        group([8], [one(3, 0.5), one(200, 0.0), one(11, 0.0), one(64, 1.0)], group_id=1),
    ]


@pytest.fixture(scope="module")
def expected_gradient(model_path):
    return reference_gradient(model_path, unequal_groups())


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("limit", [210, 512, 4096])
@pytest.mark.parametrize("skip", [True, False])
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(
    model_path, expected_gradient, share, limit, skip
):
    policy = load(model_path)
    optimizer = make_optimizer(policy)
    step = pack(
        unequal_groups(), share_prompts=share, micro_batch_tokens=limit, skip_zero_advantage=skip
    )
    assert not run(policy, optimizer, step).skipped
    found = gradient_after_first_step(optimizer)
    assert found.keys() == expected_gradient.keys()
    for name, wanted in expected_gradient.items():
        assert_near(found[name], wanted)


def assert_near(found, wanted, tolerance=1e-5):
    """Largest difference relative to the largest value of the tensor."""
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_equal_the_librarys_own_and_carry_the_temperature(model_path, temperature):
    # F013: shared rows, separate rows, and one plain forward pass per rollout.
    groups = random_groups(np.random.default_rng(4), num_groups=2, group_size=3, vocab=90)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    policy = load(model_path)
    with torch.no_grad():
        wanted = {
            (item.group_id, one.completion_tokens.tobytes()): plain_logprobs(
                model, item.prompt_tokens, one.completion_tokens, temperature
            ).tolist()
            for item in groups
            for one in item.rollouts
        }
        for share in (True, False):
            found = []
            step = pack(groups, version=0, share_prompts=share, micro_batch_tokens=64)
            for micro in step.micro_batches:
                logprobs, _ = policy(
                    torch.tensor(micro.tokens).long(),
                    torch.tensor(micro.position_ids).long(),
                    None if micro.is_causal else torch.tensor(micro.segments).long(),
                    torch.tensor(micro.predictor_index),
                    torch.tensor(micro.targets).long(),
                    temperature,
                )
                found += logprobs.tolist()
            flat = sorted(value for values in wanted.values() for value in values)
            assert sorted(found) == pytest.approx(flat, abs=1e-5)


def test_the_mask_lets_completions_see_the_prompt_and_themselves_only():
    segments = torch.tensor([[0, 0, 1, 1, 2, -1]])
    allowed = attention_mask(segments)[0, 0].int().tolist()
    assert allowed == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_mismatch_is_the_learners_minus_the_stored_logprob_token_by_token(model_path):
    # F002: stored under older versions by another policy; nothing may replace the stored values.
    groups = random_groups(
        np.random.default_rng(9), num_groups=3, group_size=4, vocab=90, version=3, max_staleness=2
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    differences = {0: [], 1: [], 2: []}
    with torch.no_grad():
        for item in groups:
            for one in item.rollouts:
                logprobs = plain_logprobs(model, item.prompt_tokens, one.completion_tokens)
                y = logprobs.double() - torch.from_numpy(one.behaviour_logprobs).double()
                for value, version in zip(y.tolist(), one.token_versions.tolist(), strict=True):
                    differences[3 - version].append(value)
    policy = load(model_path)
    values = run(policy, make_optimizer(policy), pack(groups)).values
    for d, y in differences.items():
        assert values[f"mismatch/tokens@{d}"] == len(y)
        assert values[f"mismatch/k1@{d}"] == pytest.approx(-np.mean(y), rel=1e-4)
        assert values[f"mismatch/abs@{d}"] == pytest.approx(np.mean(np.abs(y)), rel=1e-4)
        k3 = np.mean(np.exp(y) - 1 - np.array(y))
        assert values[f"mismatch/k3@{d}"] == pytest.approx(k3, rel=1e-3)
    everything = [value for y in differences.values() for value in y]
    assert values["mismatch/max"] == pytest.approx(np.abs(everything).max(), rel=1e-4)
    assert values["mismatch/abs"] > 0.1


def test_sums_describe_the_loss_and_entropy_is_that_of_the_model(model_path):
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    policy = load(model_path)
    step = pack(groups, version=0)
    result = run(policy, make_optimizer(policy), step)
    assert result.num_measured == step.num_tokens
    # One update per batch: the ratio is 1, so nothing is ever clipped.
    assert result.sums["ratio/clipped_high"] == result.sums["ratio/clipped_low"] == 0
    assert 0 < result.values["policy/entropy"] < math.log(110)
    assert 0 < result.sums["tis/weight"] <= 2.0 * step.num_tokens


def test_a_gradient_that_is_not_finite_changes_no_bit(model_path):
    # F015: one clean step, one poisoned, one clean; the poisoned one might not have been.
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    clean = pack(groups, version=0)
    micro = clean.micro_batches[0]
    micro_advantages = micro.advantages.copy()
    micro_advantages[0] = np.nan
    poisoned = replace(clean, micro_batches=(replace(micro, advantages=micro_advantages),))
    policy, control = load(model_path), load(model_path)
    optimizer, control_optimizer = make_optimizer(policy), make_optimizer(control)
    run(policy, optimizer, clean)
    before = snapshot(policy, optimizer)
    result = run(policy, optimizer, poisoned)
    assert result.skipped == "not finite"
    assert result.values["optimizer/skipped"] == 1.0
    assert all(map(math.isfinite, [*result.sums.values(), *result.values.values()]))
    assert identical(snapshot(policy, optimizer), before)
    assert not run(policy, optimizer, clean).skipped
    run(control, control_optimizer, clean)
    run(control, control_optimizer, clean)
    assert identical(snapshot(policy, optimizer), snapshot(control, control_optimizer))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_stored_logprob_that_is_not_finite_costs_only_its_token(model_path, bad):
    def groups(value):
        members = [
            rollout([5, 6, 7], score=1.0, logprobs=[-1.0, value, -1.0]),
            rollout([8], score=0.0, logprobs=[-2.0]),
        ]
        return [group([9], members)]

    policy = load(model_path)
    result = run(policy, make_optimizer(policy), pack(groups(bad), version=0))
    assert not result.skipped
    assert result.sums["mismatch/nonfinite"] == 1
    assert result.values["mismatch/tokens"] == 3


def test_steps_without_tokens_or_signal_are_skipped_with_the_reason(model_path):
    policy = load(model_path)
    optimizer = make_optimizer(policy, weight_decay=0.1)
    members = [rollout([5], score=0.0), rollout([6], score=1.0)]
    run(policy, optimizer, pack([group([1], members)], version=0))
    before = snapshot(policy, optimizer)
    unscored = [group([1], [rollout([2], status="error"), rollout([3], status="timeout")])]
    equal = [group([1], [rollout([2], score=1.0), rollout([3], score=1.0)])]
    for groups, reason in ((unscored, "no tokens"), (equal, "no signal")):
        for skip in (True, False):
            step = pack(groups, version=0, skip_zero_advantage=skip)
            result = run(policy, optimizer, step)
            assert result.skipped == reason
            assert result.sums == {}
            assert identical(snapshot(policy, optimizer), before)


def test_the_gradient_is_scaled_down_to_the_longest_allowed(model_path):
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    policy = load(model_path)
    optimizer = make_optimizer(policy, max_grad_norm=0.01)
    result = run(policy, optimizer, pack(groups, version=0))
    gradient = gradient_after_first_step(optimizer)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
    assert result.values["optimizer/grad_norm"] > 0.1
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_the_learning_rate_is_a_function_of_the_version_alone(model_path):
    # F079: a run resumed at 37 continues where it was.
    optimizer = make_optimizer(load(model_path), learning_rate=4e-3, num_warmup_steps=4)
    rates = [optimizer.learning_rate(version) for version in range(6)]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3, 4e-3])
    constant = make_optimizer(load(model_path), learning_rate=4e-3)
    assert [constant.learning_rate(v) for v in (0, 37)] == [4e-3, 4e-3]


def test_spans_are_recorded(model_path):
    groups = random_groups(np.random.default_rng(2), num_groups=1, group_size=3, vocab=90)
    policy = load(model_path)
    tracer = Tracer(None, process="test")
    train_step(
        policy,
        make_optimizer(policy),
        pack(groups, version=0),
        loss=LOSS,
        temperature=1.0,
        ranks=Ranks(),
        tracer=tracer,
    )
    assert tracer.totals().keys() == {"learner/forward", "learner/backward", "learner/optimizer"}


def tiny(config):
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def test_dropout_never_acts():
    # F018.
    config = GPT2Config(
        vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.5,
        resid_pdrop=0.5, embd_pdrop=0.5,
    )  # fmt: skip
    policy = Policy(tiny(config))
    policy.train()
    tokens = torch.arange(6)[None]
    arguments = (tokens, tokens, None, torch.tensor([2, 3]), torch.tensor([3, 4]), 1.0)
    first, second = policy(*arguments)[0], policy(*arguments)[0]
    assert torch.equal(first, second)


SMALL = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**SMALL, sliding_window=8), "sliding window 8"),
        (GraniteConfig(**SMALL, logits_scaling=1.01), "scaled or capped"),
    ],
)
def test_models_that_compute_logits_another_way_are_refused(config, reason):
    with pytest.raises(ConfigError, match=reason):
        Policy(tiny(config))


def test_a_path_that_is_no_model_names_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        load(tmp_path / "nothing")


def test_bfloat16_products_keep_parameters_and_logprobs_in_float32(model_path):
    groups = random_groups(np.random.default_rng(2), num_groups=2, group_size=3, vocab=90)
    exact, rounded = (
        load(model_path),
        Policy.load(model_path, device=CPU, compute_dtype=torch.bfloat16),
    )
    optimizers = [make_optimizer(exact), make_optimizer(rounded)]
    results = [
        run(p, o, pack(groups, version=0))
        for p, o in zip((exact, rounded), optimizers, strict=True)
    ]
    assert {p.dtype for p in rounded.parameters()} == {torch.float32}
    # bf16 keeps 8 bits; the step must be the same up to that, not merely finite.
    left, right = (r.values["optimizer/grad_norm"] for r in results)
    assert right == pytest.approx(left, rel=0.05)
    assert right != left


def test_the_compute_type_can_be_chosen():
    assert choose_dtype("float32", CPU) == torch.float32
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
