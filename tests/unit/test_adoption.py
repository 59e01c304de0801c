"""From the learner's policy to the generator's engine, through a real publisher: sound engines pass every
version, an engine with a fault ends in WeightMismatchError. The faults are in subclasses of the real one.
"""

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.config import RunConfig
from asyncrl.errors import WeightMismatchError
from asyncrl.generator.adoption import Adopter
from asyncrl.generator.hf_engine import HFEngine
from asyncrl.learner.model import Policy
from asyncrl.learner.probe import Prober
from asyncrl.telemetry.trace import Tracer
from asyncrl.weights.snapshot import named_weights
from tests.engines import new_engine, prompt, request, start_engine
from tests.models import make_tiny_model
from tests.unit.weight_peers import TRANSPORTS, fetch, generating, learning

SQUARE = "model.layers.0.self_attn.q_proj.weight"
SKIPPED = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=128)


class Learning:
    """A policy, its prober, and the way of its versions to a generator."""

    def __init__(self, path, dtype=torch.float32):
        config = {"model": {"path": str(path)}, "task": {"kind": "repeat_letter"}}
        self.policy = Policy.load(path, device=torch.device("cpu"), compute_dtype=dtype)
        self.prober = Prober.begin(self.policy, RunConfig.model_validate(config))
        self.draw = torch.Generator().manual_seed(0)

    def step(self, size=1e-3):
        """Every tensor moves by `size` of its own spread, as after one small update."""
        with torch.no_grad():
            for weights in self.policy.parameters():
                noise = torch.randn(weights.shape, generator=self.draw)
                weights += size * weights.abs().mean() * noise

    def publish(self, version, *, due=True, off=False, transport="shm", tmp_path, epoch=0):
        """Staged weights of a generator that hears of no other version."""
        scores = self.prober.score(self.policy, num_passed=0) if due else None
        probe = None if off else self.prober.probe(version, scores)
        tensors = named_weights(self.policy.model)
        with (
            learning(tensors, tmp_path, transport, epoch=epoch) as learner,
            generating(tmp_path) as subscriber,
        ):
            return fetch(subscriber, learner.publish(version, probe=probe))


@pytest.fixture
def learner(path, tmp_path):
    return Learning(path)


class Unmoved(HFEngine):
    """Reports every adoption and makes none."""

    def adopt(self, version, tensors, *, file=None):
        self._version = version


class Transposing(HFEngine):
    """Gets one square matrix the wrong way round."""

    def adopt(self, version, tensors, *, file=None):
        turned = ((n, t.T.contiguous() if n == SQUARE else t) for n, t in tensors)
        super().adopt(version, turned)


class Skipping(HFEngine):
    """Leaves one tensor as it was."""

    def adopt(self, version, tensors, *, file=None):
        old = self._model.get_parameter(SKIPPED).clone()
        super().adopt(version, ((n, old if n == SKIPPED else t) for n, t in tensors))


class StaleHead(HFEngine):
    """Computes with a copy of the tied head that adoptions do not reach."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        head = self._model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)

    def adopt(self, version, tensors, *, file=None):
        head = self._model.get_output_embeddings().weight.clone()
        super().adopt(version, chain(tensors, [("lm_head.weight", head)]))


FAULTS = [
    (Unmoved, "nothing was adopted"),
    (Transposing, "skipped, misplaced or left stale"),
    (Skipping, "skipped, misplaced or left stale"),
    (StaleHead, "skipped, misplaced or left stale"),
]


def start(kind, path, **options):
    options = {"device": "cpu", "dtype": "float32", "max_concurrent_completions": 8} | options
    return kind(str(path), **options)


def adopter_of(engine):
    return Adopter(engine, Tracer(None, process="test"))


@pytest.mark.parametrize("version", [1, 40])
@pytest.mark.parametrize(("kind", "message"), FAULTS)
def test_a_fault_is_caught_at_the_first_adoption(path, learner, tmp_path, kind, message, version):
    """Also by a generator that starts in the middle of a run."""
    for _ in range(version):
        learner.step()
    adopter = adopter_of(start(kind, path))
    with pytest.raises(WeightMismatchError, match=message):
        adopter.adopt(learner.publish(version, tmp_path=tmp_path))


@pytest.mark.parametrize(("kind", "message"), FAULTS)
def test_a_fault_in_bfloat16_is_caught_once_it_is_larger_than_numerics(
    path, tmp_path, kind, message
):
    learner = Learning(path, torch.bfloat16)
    learner.step(size=0.5)
    adopter = adopter_of(start(kind, path, dtype="bfloat16"))
    with pytest.raises(WeightMismatchError, match=message):
        adopter.adopt(learner.publish(1, tmp_path=tmp_path))


@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        *(("hf", transport) for transport in TRANSPORTS),
        pytest.param("vllm-keep", "shm", marks=pytest.mark.vllm),
    ],
)
def test_a_sound_engine_passes_every_check(path, learner, tmp_path, kind, transport):
    engine = start_engine(kind, path)
    adopter = adopter_of(engine)
    engine.submit(request(0, num_completions=2, max_tokens=60))
    for version in range(1, 13):
        learner.step()
        adopter.adopt(learner.publish(version, transport=transport, tmp_path=tmp_path))
        engine.step()
        assert engine.version == version
    assert adopter.totals["adopted"] == 12
    assert adopter.totals["canary/checks"] == 4  # versions 1, 3, 5, 9
    assert 0 < adopter.totals["canary/distance"] / 4 < 1e-5
    assert engine.num_unfinished == 2  # scoring disturbed nobody
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_engine_in_bfloat16_passes_every_check_of_a_long_run(path, tmp_path, dtype):
    learner = Learning(path, dtype)
    adopter = adopter_of(start(HFEngine, path, dtype="bfloat16"))
    for version in range(1, 66):
        learner.step(size=0.03)  # in 65 steps a quarter of each tensor's spread, at random
        adopter.adopt(learner.publish(version, tmp_path=tmp_path))
    assert adopter.totals["canary/checks"] == 7  # 1, 3, 5, 9, 17, 33, 65


def test_a_fault_that_comes_later_is_caught_at_the_next_check(path, learner, tmp_path):
    engine = start(HFEngine, path)
    adopter = adopter_of(engine)
    for version in range(1, 5):  # the last check was at version 3
        learner.step()
        if version == 4:
            engine.__class__ = Skipping
        adopter.adopt(learner.publish(version, tmp_path=tmp_path))
    learner.step()
    with pytest.raises(WeightMismatchError, match="after adopting version 5"):
        adopter.adopt(learner.publish(5, tmp_path=tmp_path))


def test_versions_without_logprobs_are_adopted_unchecked(path, learner, tmp_path):
    adopter = adopter_of(start(Skipping, path))
    learner.step()
    adopter.adopt(learner.publish(1, due=False, tmp_path=tmp_path))
    assert adopter.totals == {"adopted": 1.0, "canary/checks": 0.0, "canary/distance": 0.0}
    # The engine was scored before it, though, so that the next one can be.
    learner.step()
    with pytest.raises(WeightMismatchError, match="after adopting version 2"):
        adopter.adopt(learner.publish(2, tmp_path=tmp_path))


def test_without_a_probe_nothing_is_scored(path, learner, tmp_path):
    adopter = adopter_of(start(Skipping, path))
    for version in (1, 2):
        learner.step()
        adopter.adopt(learner.publish(version, off=True, tmp_path=tmp_path))
    assert adopter.totals == {"adopted": 2.0, "canary/checks": 0.0, "canary/distance": 0.0}


def test_a_learner_that_comes_back_is_compared_at_once(path, learner, tmp_path):
    adopter = adopter_of(start(HFEngine, path))
    for epoch, version in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3)):
        learner.step()
        adopter.adopt(learner.publish(version, epoch=epoch, tmp_path=tmp_path))
    assert adopter.totals["canary/checks"] == 3  # (0, 1), (0, 3), (1, 2)


def test_a_generator_that_loaded_other_weights_is_refused_before_it_adopts(path, learner, tmp_path):
    other = start(HFEngine, make_tiny_model(tmp_path / "other", seed=1, hidden=128))
    with pytest.raises(WeightMismatchError, match="computes another model, or the files changed"):
        adopter_of(other).adopt(learner.publish(1, tmp_path=tmp_path))
    assert other.version == 0


def test_a_sequence_that_the_engine_cannot_score_is_refused(path, learner, tmp_path):
    small = new_engine(path)
    small._model.get_input_embeddings().num_embeddings = 90
    with pytest.raises(WeightMismatchError, match=r"cannot score .* outside 0 \.\. 89"):
        adopter_of(small).adopt(learner.publish(1, tmp_path=tmp_path))


def test_an_engine_refuses_to_score_what_it_cannot(path):
    engine = new_engine(path)
    limit = engine.max_context_tokens
    assert engine.score(prompt(limit)).shape == (limit - 1,)
    for tokens, message in (
        (prompt(1), f"2 .. {limit} tokens, got 1"),
        (prompt(limit + 1), f"2 .. {limit} tokens, got {limit + 1}"),
        (np.array([5, 100], np.int32), "token ids outside 0 .. 99"),
        (np.array([5, -1], np.int32), "token ids outside 0 .. 99"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.score(tokens)
