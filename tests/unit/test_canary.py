"""The canary: real engines with real faults in their weights; plain transformers is the learner."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import WeightMismatchError
from asyncrl.generator.canary import Canary
from tests.engines import ENGINE_KINDS, prompt, start_engine
from tests.models import make_tiny_model

TOKENS = prompt(64, seed=5)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=128)


@pytest.fixture(scope="module")
def learner(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.fixture(scope="module")
def versions(learner):
    """Version 0 and a version one small step away: each tensor moved by 0.1 % of its own spread."""
    first = {name: values.clone() for name, values in learner.state_dict().items()}
    del first["lm_head.weight"]  # tied
    generator = torch.Generator().manual_seed(0)
    return first, {
        name: values + 1e-3 * values.abs().mean() * torch.randn(values.shape, generator=generator)
        for name, values in first.items()
    }


def learner_logprobs(learner, state):
    learner.load_state_dict(state, strict=False)
    tokens = torch.from_numpy(TOKENS).long()
    with torch.no_grad():
        table = torch.log_softmax(learner(tokens[None]).logits[0, :-1], dim=-1)
    return table.gather(1, tokens[1:, None])[:, 0].numpy()


@pytest.fixture(scope="module", params=ENGINE_KINDS)
def started(request, path):
    engine = start_engine(request.param, path)
    yield engine
    engine.close()


@pytest.fixture
def engine(started, versions):
    started.adopt(0, versions[0].items())
    return started


def start_canary(engine, learner, versions):
    logprobs = learner_logprobs(learner, versions[0])
    return Canary(engine.score(TOKENS), logprobs, precision="float32")


def test_an_adopted_version_passes_and_the_distance_is_numerics(engine, learner, versions):
    canary = start_canary(engine, learner, versions)
    expected = learner_logprobs(learner, versions[1])
    engine.adopt(1, versions[1].items())
    scores = engine.score(TOKENS)
    distance = np.mean(np.abs(scores.astype(float) - expected))
    assert canary.check(1, scores, expected) == pytest.approx(distance, rel=1e-6)
    assert distance < 1e-5


def test_an_adoption_that_changed_nothing_is_caught(engine, learner, versions):
    canary = start_canary(engine, learner, versions)
    expected = learner_logprobs(learner, versions[1])
    with pytest.raises(WeightMismatchError, match="nothing was adopted"):
        canary.check(1, engine.score(TOKENS), expected)


def test_every_single_skipped_tensor_is_caught(engine, learner, versions):
    canary = start_canary(engine, learner, versions)
    expected = learner_logprobs(learner, versions[1])
    for name, values in versions[0].items():
        engine.adopt(1, (versions[1] | {name: values}).items())
        with pytest.raises(WeightMismatchError, match="skipped, misplaced or left stale"):
            canary.check(1, engine.score(TOKENS), expected)


def test_a_transposed_tensor_is_caught(engine, learner, versions):
    canary = start_canary(engine, learner, versions)
    expected = learner_logprobs(learner, versions[1])
    name = "model.layers.0.self_attn.q_proj.weight"
    square = versions[1][name]
    assert square.shape[0] == square.shape[1]
    engine.adopt(1, (versions[1] | {name: square.T.contiguous()}).items())
    with pytest.raises(WeightMismatchError, match="after adopting version 1"):
        canary.check(1, engine.score(TOKENS), expected)


@pytest.mark.vllm
def test_the_tied_head_that_vllm_leaves_stale_on_a_cpu_is_caught(
    path, learner, versions, monkeypatch
):
    # F017.
    engine = start_engine("vllm-keep", path)
    canary = start_canary(engine, learner, versions)
    expected = learner_logprobs(learner, versions[1])
    reload = pytest.importorskip("asyncrl.generator.vllm_reload")
    monkeypatch.setattr(reload, "repack_heads", lambda model: None)
    engine.adopt(1, versions[1].items())
    with pytest.raises(WeightMismatchError, match="left stale"):
        canary.check(1, engine.score(TOKENS), expected)
    engine.close()


# Ten log-probs of standard deviation 1 (half of them at -3, half at -1).
LOGPROBS = np.array([-3.0, -1.0] * 5, np.float32)


def test_two_different_models_are_refused_at_the_start():
    # At most 0.25 * 1 nats.
    Canary(LOGPROBS + np.float32(0.24), LOGPROBS, precision="bfloat16")
    with pytest.raises(WeightMismatchError, match=r"differ by 0\.26 nats.*at most 0\.25"):
        Canary(LOGPROBS + np.float32(0.26), LOGPROBS, precision="bfloat16")
    with pytest.raises(WeightMismatchError, match=r"scored 10 tokens .* the learner 9"):
        Canary(LOGPROBS, LOGPROBS[1:], precision="float32")
    with pytest.raises(WeightMismatchError, match="nan"):
        Canary(np.full(10, np.nan, np.float32), LOGPROBS, precision="float32")


def test_models_of_other_weights_are_refused_at_the_start(path, learner, versions, tmp_path):
    other = start_engine("hf", make_tiny_model(tmp_path / "other", seed=1, hidden=128))
    with pytest.raises(WeightMismatchError, match="one of them computes another model"):
        start_canary(other, learner, versions)


def test_the_limit_grows_with_the_distance_at_the_start():
    # d_0 = 0.01, s = 1; limit = 3 * 0.01 + 0.01 * 1 = 0.04. A shift moves all and spreads nothing.
    canary = Canary(LOGPROBS + np.float32(0.01), LOGPROBS, precision="bfloat16")
    moved = LOGPROBS + np.float32(1.0)
    assert canary.check(1, moved + np.float32(0.039), moved) == pytest.approx(0.039, rel=1e-4)
    with pytest.raises(WeightMismatchError, match=r"by 0\.041 nats.*explain 0\.04;.*moved by 1\)"):
        canary.check(2, moved + np.float32(0.041), moved)


def test_the_limit_grows_with_the_spread_of_the_logprobs():
    # s_v = 4; limit = 3 * 0.01 * 4 + 0.01 * 4 = 0.16.
    canary = Canary(LOGPROBS + np.float32(0.01), LOGPROBS, precision="bfloat16")
    sharper = LOGPROBS * np.float32(4.0)
    assert canary.check(1, sharper + np.float32(0.159), sharper) == pytest.approx(0.159, rel=1e-4)
    with pytest.raises(WeightMismatchError, match=r"numerics explain 0\.16;"):
        canary.check(2, sharper + np.float32(0.161), sharper)


def test_one_token_far_out_counts_as_one():
    # 0.3 nats on one token of ten: mean 0.03, below the limit of 0.04 (root mean square: 0.095).
    canary = Canary(LOGPROBS + np.float32(0.01), LOGPROBS, precision="bfloat16")
    scores = LOGPROBS.copy()
    scores[3] += 0.3
    assert canary.check(1, scores, LOGPROBS) == pytest.approx(0.03, rel=1e-4)


def test_scores_that_did_not_move_are_a_fault_only_if_the_learner_left_numerics_behind():
    # d_0 = 0.01, floor = 0.01: a step of 0.019 may vanish in bfloat16, one of 0.021 may not.
    scores = LOGPROBS + np.float32(0.01)
    canary = Canary(scores, LOGPROBS, precision="bfloat16")
    assert canary.check(1, scores, LOGPROBS) == pytest.approx(0.01, rel=1e-4)
    assert canary.check(2, scores, LOGPROBS + np.float32(0.019)) == pytest.approx(0.009, rel=1e-3)
    with pytest.raises(WeightMismatchError, match=r"moved by 0\.021 nats: nothing was adopted"):
        canary.check(3, scores, LOGPROBS + np.float32(0.021))


def test_it_is_due_at_the_first_adoption_and_then_ever_more_rarely():
    canary = Canary(LOGPROBS, LOGPROBS, precision="float32")
    for first in (5, 3):  # the second learner resumed from an older version
        looked = []
        for version in range(first, first + 35):
            if canary.is_due(version):
                canary.check(version, LOGPROBS, LOGPROBS)
                looked.append(version - first)
        assert looked == [0, 2, 4, 8, 16, 32]
        canary.restart()
