"""The learner's adapter: version 0 is the base, nothing else is trained, saved or published."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config import LoraConfig, RunConfig
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.assemble import load_policy, published_weights
from asyncrl.learner.checkpoint import CheckpointFacts, latest, load_optimizer, save
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.reference import choose_reference
from asyncrl.weights.adapter import adapter_names
from tests.models import make_tiny_model
from tests.reference import stepping
from tests.reference.groups import random_groups
from tests.reference.stepping import (
    algorithm,
    assert_near,
    everything,
    gradient_after_first_step,
    identical,
    make_optimizer,
    micro_batches,
    pack,
    run_step,
)

RANK, ALPHA, SCALE = 3, 12.0, 4.0
FACTS = CheckpointFacts(version=2, epoch=0, cursor=0, lineage="l", run_name="r")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def config_of(path, *, kl="none", seed=0, **lora):
    return RunConfig.model_validate(
        {
            "model": {"path": str(path)},
            "task": {"kind": "repeat_letter"},
            "seed": seed,
            "learner": {"dtype": "float32"},
            "algorithm": {"kl": {"kind": kl}},
            "lora": {"rank": RANK, "alpha": ALPHA, "serving": "merged", **lora},
        }
    )


def adapted(path, **options):
    return load_policy(config_of(path, **options), None, CPU)


def disturb(policy, seed=0):
    """An adapter that does something: random B."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_weights():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def groups(seed=3, version=0):
    return random_groups(
        np.random.default_rng(seed), num_groups=3, group_size=3, vocab=90, version=version
    )


def scores(policy, step=None):
    """Log-probs of every micro-batch of some step."""
    found = []
    for micro in micro_batches(step or pack(groups())):
        segments = None if micro.is_causal else torch.as_tensor(micro.segments)
        arrays = (micro.tokens, micro.position_ids)
        tensors = [torch.as_tensor(array, dtype=torch.int64) for array in arrays]
        targets = [
            torch.as_tensor(a, dtype=torch.int64) for a in (micro.predictor_index, micro.targets)
        ]
        found.append(policy(*tensors, segments, *targets, 1.0)[0].detach())
    return torch.cat(found)


def test_version_0_is_the_model_bit_for_bit_and_a_trained_adapter_is_not(path):
    base, policy = scores(stepping.load_policy(path)), adapted(path)
    assert torch.equal(scores(policy), base)
    assert float((scores(disturb(policy)) - base).abs().max()) > 0.1


def test_the_first_adapter_follows_from_the_seed_of_the_run_and_nothing_else(path):
    torch.manual_seed(1)
    one = dict(adapted(path, seed=5).requires_grad_(False).named_weights())
    torch.manual_seed(2)
    again, other = (
        dict(adapted(path, seed=seed).requires_grad_(False).named_weights()) for seed in (5, 6)
    )
    assert identical(one, again)
    for name, value in one.items():
        if ".lora_B." in name:
            assert not value.any()
        else:
            # Uniform in +-1/sqrt(in): a variance of 1 / (3 in).
            bound = value.shape[1] ** -0.5
            assert float(value.abs().max()) <= bound
            assert float(value.std()) == pytest.approx(bound / 3**0.5, rel=0.2)
            assert not torch.equal(value, other[name])


def test_only_the_adapter_is_trained_and_published(path):
    policy = disturb(adapted(path))
    frozen = {n: p.clone() for n, p in policy.named_parameters() if not p.requires_grad}
    optimizer = make_optimizer(policy, weight_decay=0.1)
    before = everything(policy, optimizer)
    assert not run_step(policy, optimizer, pack(groups())).skipped
    after = everything(policy, optimizer)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert set(frozen) | {
        f"model.{name.removeprefix('base_model.model.').replace('.weight', '.default.weight')}"
        for name, _ in policy.named_weights()
    } == {name for name, _ in policy.named_parameters()}
    assert all(torch.equal(p, frozen[n]) for n, p in policy.named_parameters() if n in frozen)
    published = dict(published_weights(policy))
    modules = [f"self_attn.{c}_proj" for c in "qkvo"] + [
        f"mlp.{c}_proj" for c in ("gate", "up", "down")
    ]
    assert list(published) == [
        name
        for layer in range(2)
        for module in modules
        for name in adapter_names(f"model.layers.{layer}.{module}")
    ]


@pytest.mark.parametrize("limit", [40, 4096])
def test_the_gradient_is_the_chain_rule_over_the_merged_weights(path, limit):
    # W = W_0 + s B A, so dA = s B^T dW and dB = s dW A^T, with dW of a model that holds W itself.
    policy = disturb(adapted(path))
    factors = {name: value.detach().clone() for name, value in policy.named_weights()}
    whole = stepping.load_policy(path)
    targets = [n for n, _ in whole.named_weights() if n.endswith("_proj.weight")]
    with torch.no_grad():
        for name, weight in whole.named_weights():
            if name in targets:
                a, b = (factors[n] for n in adapter_names(name.removesuffix(".weight")))
                weight += SCALE * (b @ a)
    optimizers = make_optimizer(policy), make_optimizer(whole)
    step = pack(groups(), micro_batch_tokens=limit)
    for one, optimizer in zip((policy, whole), optimizers, strict=True):
        run_step(one, optimizer, step)
    found, full = map(gradient_after_first_step, optimizers)
    for name in targets:
        name_a, name_b = adapter_names(name.removesuffix(".weight"))
        assert_near(found[name_a], SCALE * factors[name_b].T @ full[name], tolerance=2e-5)
        assert_near(found[name_b], SCALE * full[name] @ factors[name_a].T, tolerance=2e-5)


@pytest.mark.parametrize("kind", ["reward_k1", "loss_k2", "loss_k3"])
def test_the_adapter_switched_off_is_the_reference_and_no_second_model_is_loaded(
    path, kind, caplog
):
    # F011.
    config = config_of(path, kl=kind)
    with caplog.at_level("INFO"):
        policy = load_policy(config, None, CPU)
        reference = choose_reference(config, policy, mesh=None)
    assert f"KL reference: the model of {path}, the adapter switched off" in caplog.text
    base = scores(stepping.load_policy(path))
    assert torch.equal(scores(policy), scores(reference))
    disturb(policy)
    before = scores(policy)
    assert torch.equal(scores(reference), base)
    assert torch.equal(scores(policy), before)
    assert all(parameter.requires_grad for _, parameter in policy.named_weights())


@pytest.mark.parametrize("kind", ["reward_k1", "loss_k2", "loss_k3"])
def test_a_step_with_the_adapter_off_as_reference_is_that_with_the_model_loaded_twice(path, kind):
    # F011: the reference's pass stands between the forward and the backward pass of the policy.
    objective = stepping.Objective.of(
        algorithm(kl={"kind": kind, "coefficient": 0.7}, num_minibatches=1)
    )
    trained = []
    for twice in (False, True):
        policy = disturb(adapted(path, kl=kind))
        own = choose_reference(config_of(path, kl=kind), policy, mesh=None)
        optimizer = make_optimizer(policy)
        reference = stepping.load_policy(path) if twice else own
        step = pack(groups(), micro_batch_tokens=40)
        result = run_step(policy, optimizer, step, objective=objective, reference=reference)
        assert result.sums["kl/k3"] > 1
        trained.append(everything(policy, optimizer))
    assert identical(*trained)


@pytest.mark.parametrize("kind", ["reward_k1", "loss_k2", "loss_k3"])
def test_a_new_adapter_over_a_model_with_one_merged_starts_at_its_reference(path, tmp_path, kind):
    # F011: "adapter off" must be where the run begins, not the model before the first adapter.
    first = disturb(adapted(path))
    (tmp_path / "adapter").mkdir()
    first.save(tmp_path / "adapter", {n: p.detach() for n, p in first.named_weights()})
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    config = config_of(tmp_path / "merged", kl=kind)
    policy = load_policy(config, None, CPU)
    assert float((scores(policy) - scores(first)).abs().max()) < 1e-4
    result = run_step(
        policy,
        make_optimizer(policy),
        pack(groups()),
        objective=stepping.Objective.of(algorithm(kl={"kind": kind, "coefficient": 0.7})),
        reference=choose_reference(config, policy, mesh=None),
    )
    assert result.sums["kl/k3"] / result.num_measured < 1e-4


@pytest.mark.parametrize("rank", [0, RANK])
def test_an_adapter_is_refused_as_the_model_to_start_from(path, tmp_path, rank):
    # F011: transformers would load it, and its absence would then be taken for the reference.
    policy = disturb(adapted(path))
    policy.save(tmp_path, {name: value.detach() for name, value in policy.named_weights()})
    with pytest.raises(ConfigError, match="is an adapter and not a model: merge it first"):
        load_policy(config_of(tmp_path, rank=rank), None, CPU)


def test_a_reference_survives_a_resume(path, tmp_path):
    # F011: it is the model that the run began with, not the adapter that it goes on with.
    config = config_of(path, kl="loss_k2")
    saved = disturb(load_policy(config, None, CPU))
    store(tmp_path, saved, make_optimizer(saved), path)
    resumed = load_policy(config, latest(tmp_path), CPU)
    reference = choose_reference(config, resumed, mesh=None)
    assert torch.equal(scores(resumed), scores(saved))
    assert torch.equal(scores(reference), scores(stepping.load_policy(path)))


def store(directory, policy, optimizer, path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    save(directory, FACTS, policy, optimizer, tokenizer=tokenizer, num_kept=2, ranks=Ranks())


def test_three_steps_equal_two_a_restart_and_one(path, tmp_path):
    policy = adapted(path)
    optimizer = make_optimizer(policy, weight_decay=0.01)
    for version in (0, 1):
        run_step(policy, optimizer, pack(groups(version)))
    store(tmp_path, policy, optimizer, path)
    run_step(policy, optimizer, pack(groups(2)))

    found = latest(tmp_path)
    resumed = load_policy(config_of(path), found, CPU)
    restored = make_optimizer(resumed, weight_decay=0.01)
    load_optimizer(found, restored)
    run_step(resumed, restored, pack(groups(2)))
    assert identical(everything(resumed, restored), everything(policy, optimizer))


def test_a_checkpoint_is_a_small_folder_that_peft_reads(path, tmp_path):
    policy = disturb(adapted(path))
    store(tmp_path, policy, make_optimizer(policy), path)
    folder = tmp_path / "version-000002"
    stored = load_file(folder / "adapter_model.safetensors")
    assert identical(stored, dict(published_weights(policy)))
    assert not (folder / "model.safetensors").exists()
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (RANK, ALPHA, 0.0)
    assert settings["base_model_name_or_path"] == str(path)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, folder)
    tokens = torch.arange(4, 40)[None]
    with torch.no_grad():
        wanted, found = theirs(tokens).logits, policy.model(input_ids=tokens).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_checkpoint_of_other_modules_is_refused(path, tmp_path):
    policy = adapted(path)
    weights = {name: value.detach().clone() for name, value in policy.named_weights()}
    policy.save(tmp_path, weights)
    left_out = min(weights)
    save_file(
        {n: v for n, v in weights.items() if n != left_out}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(CheckpointError, match=left_out):
        policy.adapter.load(tmp_path)


def test_chosen_modules_alone_are_adapted(path):
    policy = adapted(path, target_modules=["q_proj", "layers.1.mlp.down_proj"])
    assert [name for name, _ in policy.named_weights() if ".lora_A." in name] == [
        adapter_names(f"model.layers.{module}")[0]
        for module in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj")
    ]


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "proj", "layers.2.self_attn.q_proj"])
def test_a_module_that_cannot_be_adapted_is_named(path, name):
    with pytest.raises(ConfigError, match=f"lora.target_modules: '{name}' is no linear module"):
        adapted(path, target_modules=["q_proj", name])


def test_without_peft_the_install_command_is_named(path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[lora\]'"):
        adapted(path)


def test_an_adapter_that_is_not_finite_is_never_saved(path, tmp_path):
    policy = adapted(path)
    with torch.no_grad():
        next(iter(dict(policy.named_weights()).values())).view(-1)[0] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        store(tmp_path, policy, make_optimizer(policy), path)


def test_dropout_cannot_be_asked_for(path):
    with pytest.raises(ValueError, match="dropout"):
        LoraConfig.model_validate({"rank": 4, "dropout": 0.1})
