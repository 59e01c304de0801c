"""Checkpoints: complete or absent, finite, the newest good one found, and an exact resume."""

import errno
import json
import logging
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.errors import CheckpointError
from asyncrl.learner.checkpoint import CheckpointFacts, latest, load_optimizer, save
from asyncrl.learner.ranks import Ranks
from tests.models import make_tiny_model
from tests.reference.groups import random_groups
from tests.reference.stepping import (
    everything,
    identical,
    load_policy,
    make_optimizer,
    pack,
    run_step,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def decaying(policy):
    return make_optimizer(policy, weight_decay=0.01, max_grad_norm=1.0, num_warmup_steps=4)


def train(policy, optimizer, version):
    groups = random_groups(np.random.default_rng(version), num_groups=2, group_size=3, vocab=90)
    step = pack(groups, version=version, max_staleness=version, micro_batch_tokens=64)
    assert not run_step(policy, optimizer, step).skipped


def facts(version):
    return CheckpointFacts(
        version=version, epoch=2, cursor=10 * version, lineage="abc", run_name="run"
    )


def store(directory, version, policy, optimizer, *, num_kept=9):
    tokenizer = AutoTokenizer.from_pretrained(policy.model.config._name_or_path)
    save(
        directory,
        facts(version),
        policy,
        optimizer,
        tokenizer=tokenizer,
        num_kept=num_kept,
        ranks=Ranks(),
    )


@pytest.fixture
def saved(model_path, tmp_path):
    """A folder with versions 1 and 2, and the policy and optimizer that made them."""
    policy = load_policy(model_path)
    optimizer = decaying(policy)
    for version in (0, 1):
        train(policy, optimizer, version)
        store(tmp_path / "c", version + 1, policy, optimizer)
    return tmp_path / "c", policy, optimizer


def test_three_steps_equal_two_a_restart_and_one(saved):
    directory, policy, optimizer = saved
    rng = torch.get_rng_state()
    train(policy, optimizer, 2)
    torch.manual_seed(123)
    found = latest(directory)
    assert found.facts == facts(2)
    resumed = load_policy(found.path)
    restored = decaying(resumed)
    load_optimizer(found, restored)
    assert torch.equal(torch.get_rng_state(), rng)
    train(resumed, restored, found.facts.version)
    assert identical(everything(resumed, restored), everything(policy, optimizer))


def test_a_checkpoint_before_the_first_step_resumes_too(model_path, tmp_path):
    policy, straight = load_policy(model_path), load_policy(model_path)
    store(tmp_path, 0, policy, decaying(policy))
    found = latest(tmp_path)
    resumed = load_policy(found.path)
    optimizers = [decaying(resumed), decaying(straight)]
    load_optimizer(found, optimizers[0])
    train(resumed, optimizers[0], 0)
    train(straight, optimizers[1], 0)
    assert identical(everything(resumed, optimizers[0]), everything(straight, optimizers[1]))


def test_a_checkpoint_is_a_model_directory_for_anybody(saved):
    directory, policy, _ = saved
    path = directory / "version-000002"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    wanted = dict(policy.model.named_parameters())
    assert all(torch.equal(value, wanted[name]) for name, value in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer.encode("12a", add_special_tokens=False)) == "12a"
    # F098: nothing in it needs unpickling.
    assert {file.suffix for file in path.iterdir()} <= {".safetensors", ".json", ".jinja"}


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def remove(path):
    path.unlink()


def empty(path):
    path.write_text("")


def wrong_shape(path):
    path.write_text(json.dumps({"facts": {"version": 2}, "files": {}}))


@pytest.mark.parametrize(
    ("harm", "file"),
    [
        (truncate, "model.safetensors"),
        (flip_a_bit, "model.safetensors"),
        (flip_a_bit, "optimizer.safetensors"),
        (remove, "optimizer.safetensors"),
        (remove, "config.json"),
        (remove, "checkpoint.json"),
        (empty, "checkpoint.json"),
        (wrong_shape, "checkpoint.json"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(saved, caplog, harm, file):
    # F078.
    directory, _, _ = saved
    harm(directory / "version-000002" / file)
    with caplog.at_level(logging.WARNING):
        found = latest(directory)
    assert found.facts == facts(1)
    assert "version-000002" in caplog.text


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    (tmp_path / ".version-000009.partial").mkdir()
    (tmp_path / "version-000009-old").mkdir()
    assert latest(tmp_path) is None


def test_only_the_newest_are_kept(saved):
    directory, policy, optimizer = saved
    store(directory, 3, policy, optimizer, num_kept=2)
    assert sorted(p.name for p in directory.iterdir()) == ["version-000002", "version-000003"]


def test_weights_that_are_not_finite_are_refused_and_the_last_good_one_stays(saved):
    # F081: however often it is tried.
    directory, policy, optimizer = saved
    with torch.no_grad():
        next(policy.parameters()).view(-1)[3] = float("nan")
    for version in (3, 4, 5):
        with pytest.raises(CheckpointError, match="not finite"):
            store(directory, version, policy, optimizer, num_kept=1)
    assert latest(directory).facts == facts(2)
    assert len(list(directory.iterdir())) == 2


class FullDisk:
    """A tokenizer whose files do not fit any more: fails after the weights were written."""

    def save_pretrained(self, save_directory):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_previous_checkpoints_and_no_rest(saved):
    # F078.
    directory, policy, optimizer = saved
    with pytest.raises(CheckpointError, match="No space left"):
        save(
            directory,
            facts(3),
            policy,
            optimizer,
            tokenizer=FullDisk(),
            num_kept=1,
            ranks=Ranks(),
        )
    assert sorted(p.name for p in directory.iterdir()) == ["version-000001", "version-000002"]
    assert latest(directory).facts == facts(2)


def test_what_a_killed_save_left_does_not_stop_the_next_one(saved):
    directory, policy, optimizer = saved
    shutil.copytree(directory / "version-000002", directory / ".version-000003.partial")
    (directory / ".version-000003.partial" / "model.safetensors").write_text("half")
    store(directory, 3, policy, optimizer)
    assert latest(directory).facts == facts(3)
    assert not list(directory.glob(".*"))


def test_leftovers_of_a_history_not_resumed_are_set_aside_and_never_read(saved):
    # F082: version 2 was damaged, so the run resumed from 1 and comes to 2 again, then ends.
    directory, policy, optimizer = saved
    shutil.copytree(directory / "version-000002", directory / "version-000030")
    flip_a_bit(directory / "version-000002" / "model.safetensors")
    store(directory, 2, policy, optimizer)
    assert latest(directory).path == directory / "version-000002"
    assert sorted(p.name for p in directory.glob("set-aside-*")) == [
        "set-aside-version-000002-1",
        "set-aside-version-000030-1",
    ]


def test_the_optimizer_of_another_model_is_refused(saved, tmp_path):
    directory, _, _ = saved
    other = load_policy(make_tiny_model(tmp_path / "other", layers=1))
    with pytest.raises(CheckpointError, match="of another model"):
        load_optimizer(latest(directory), decaying(other))
