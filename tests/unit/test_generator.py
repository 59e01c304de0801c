"""The generator's loop with a scripted broker; everything else is real."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from asyncrl.config import RunConfig
from asyncrl.generator.engine import Completion
from asyncrl.generator.evaluation import EVAL_IDS, Evaluation
from asyncrl.generator.hf_engine import HFEngine
from asyncrl.generator.process import Generator
from asyncrl.generator.prompts import PromptRenderer
from asyncrl.tasks import make_task
from asyncrl.tasks.scoring import ScoringPool
from asyncrl.telemetry.trace import Tracer
from asyncrl.types import GROUPS_PER_EPOCH, Verdict, VersionSpan
from asyncrl.weights.snapshot import named_weights
from asyncrl.weights.staging import DeviceStaging
from asyncrl.weights.subscriber import Subscriber
from asyncrl.wire import messages as m
from asyncrl.wire.codec import decode, encode
from asyncrl.wire.mailbox import Mailbox
from tests.models import make_tiny_model
from tests.reference.stepping import load_policy
from tests.unit.peers import PATIENCE_S, brokered
from tests.unit.weight_peers import learning

HELLO = m.Hello(role="generator", name="g", run_id="run", config_digest="d")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Prompt(Subscriber):
    """Fetches while its caller waits: what was announced is ready when it is next asked for."""

    newest = None

    def __init__(self, *arguments, **options):
        self.before_ready = lambda: None  # called once
        self.fetched = threading.Semaphore(0)
        super().__init__(*arguments, on_change=self.fetched.release, **options)

    def start(self, announcement):
        super().start(announcement)
        self.newest = announcement.version

    def ready(self, newest=None):
        before, self.before_ready = self.before_ready, lambda: None
        before()
        with self._changed:
            self._changed.wait_for(
                lambda: self._staged or not (self._busy or self._target), PATIENCE_S
            )
        return super().ready(newest)


class Recorded(HFEngine):
    """Keeps what happened; decodes nothing before it may."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.may_decode = lambda: True
        self.events = []

    def step(self):
        if not self.may_decode():
            return []
        finished = super().step()
        self.events += [("finished", c.request_id, c.version_spans) for c in finished]
        return finished

    def adopt(self, version, tensors, *, file=None):
        super().adopt(version, tensors)
        self.events.append(("adopted", version))


@pytest.fixture
def parts(path, tmp_path):
    """A generator's parts; evaluations of 3 prompts, 2 samples each."""
    config = RunConfig.model_validate(
        {
            "model": {"path": str(path)},
            "task": {"kind": "repeat_letter", "num_letters": 4},
            "engine": {"max_completion_tokens": 8, "max_concurrent_completions": 8},
            "eval": {"num_prompts": 3, "samples_per_prompt": 2},
        }
    )
    engine = Recorded(str(path), device="cpu", dtype="float32", max_concurrent_completions=8)
    # In the engine's memory there is room for one version, as on a GPU.
    subscriber = Prompt("run", shm_dir=tmp_path, staging=DeviceStaging(torch.device("cpu")))
    pool = ScoringPool(
        config.task, config.seed, num_workers=1, deadline_s=PATIENCE_S, max_memory_bytes=2**30
    )
    renderer = PromptRenderer(AutoTokenizer.from_pretrained(path), make_task(config.task, seed=0))
    tracer = Tracer(None, process="g")
    yield {
        "config": config, "engine": engine, "renderer": renderer, "pool": pool,
        "subscriber": subscriber, "tracer": tracer,
    }  # fmt: skip
    pool.close()
    subscriber.close()
    engine.close()


@contextmanager
def working(broker, settings, parts):
    """A generator at work on a thread of its own; told to stop in the end."""
    mailbox = Mailbox(broker.endpoint, HELLO, connect_timeout_s=PATIENCE_S)
    thread = threading.Thread(target=Generator(settings, mailbox=mailbox, **parts).run)
    thread.start()
    yield
    broker.send(m.Stop(reason="test"))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    mailbox.close("test")


def messages_until(broker, is_enough):
    """What the broker got, up to the message with which it `is_enough`."""
    came = []
    while not is_enough(came):
        came.append(broker.get().message)
        assert len(came) < 100  # counters come in any case, four a second
    return came


def test_weights_are_fetched_while_the_engine_is_in_the_middle_of_a_step(path, parts, tmp_path):
    settings = parts.pop("config")
    engine, subscriber = parts["engine"], parts["subscriber"]
    came_in_step = []

    def wait_for_weights():
        if not came_in_step:
            came_in_step.append(subscriber.fetched.acquire(timeout=PATIENCE_S))
        return True

    engine.may_decode = wait_for_weights
    with (
        brokered(m.Welcome(beat_s=1.0, silence_s=PATIENCE_S)) as broker,
        learning(named_weights(load_policy(path).model), tmp_path, "shm", epoch=0) as learner,
        working(broker, settings, parts),
    ):
        start = m.GroupStart(group_id=0, ordinal=0, attempt=0, seed=0)
        broker.send(m.Work(starts=[start]))
        broker.send(learner.publish(1))
        messages_until(broker, lambda _: ("adopted", 1) in engine.events)
    assert came_in_step == [True]


def test_weights_are_adopted_only_after_what_came_before_their_announcement(path, parts, tmp_path):
    # The broker sends Evaluate(0) and newer weights at once; here both come, and are fetched, between
    # the loop's look into the mailbox and its look for weights.
    settings = parts.pop("config")
    engine, subscriber = parts["engine"], parts["subscriber"]
    with (
        brokered(m.Welcome(beat_s=1.0, silence_s=PATIENCE_S)) as broker,
        learning(named_weights(load_policy(path).model), tmp_path, "shm", epoch=0) as learner,
    ):

        def announce():
            broker.send(m.Evaluate(version=0))
            broker.send(learner.publish(1))
            assert subscriber.fetched.acquire(timeout=PATIENCE_S)

        subscriber.before_ready = announce
        with working(broker, settings, parts):
            came = messages_until(broker, lambda came: held(came) == (0, 1))
    [done] = [one for one in came if isinstance(one, m.EvalDone)]
    assert done.version == 0
    assert [event[0] for event in engine.events] == ["finished"] * 6 + ["adopted"]


def test_weights_that_the_welcome_announces_are_adopted(path, parts, tmp_path):
    settings = parts.pop("config")
    with learning(named_weights(load_policy(path).model), tmp_path, "shm", epoch=0) as learner:
        welcome = m.Welcome(beat_s=1.0, silence_s=PATIENCE_S, announcement=learner.publish(3))
        with brokered(welcome) as broker, working(broker, settings, parts):
            messages_until(broker, lambda came: held(came) == (0, 3))
    assert parts["engine"].events == [("adopted", 3)]


@pytest.mark.parametrize("newest", [1, 2])
def test_of_weights_that_come_during_an_evaluation_the_newest_are_adopted_after_it(
    newest, path, parts, tmp_path
):
    # F090. The evaluation goes on only once the newest weights are fetched: version 1 makes room for 2.
    settings = parts.pop("config")
    engine, subscriber = parts["engine"], parts["subscriber"]
    engine.may_decode = lambda: subscriber.newest == newest and not subscriber.is_fetching
    with (
        brokered(m.Welcome(beat_s=1.0, silence_s=PATIENCE_S)) as broker,
        learning(named_weights(load_policy(path).model), tmp_path, "shm", epoch=0) as learner,
        working(broker, settings, parts),
    ):
        broker.send(m.Evaluate(version=0))
        for version in range(1, newest + 1):
            broker.send(learner.publish(version))
            assert subscriber.fetched.acquire(timeout=PATIENCE_S)
        came = messages_until(
            broker,
            lambda came: (
                any(isinstance(one, m.EvalDone) for one in came) and held(came) == (0, newest)
            ),
        )
    [done] = [one for one in came if isinstance(one, m.EvalDone)]
    assert (done.version, done.num_samples + done.num_unscored) == (0, 6)
    events = engine.events
    assert [event[0] for event in events] == ["finished"] * 6 + ["adopted"]
    *samples, adoption = events
    asked = [EVAL_IDS + ordinal for ordinal in range(3) for _ in range(2)]
    assert sorted(request_id for _, request_id, _ in samples) == asked
    for _, _, [span] in samples:
        assert isinstance(span, VersionSpan)
        assert span.version == 0
    assert adoption == ("adopted", newest)
    # It reported the evaluation before it reported the new version.
    order = [one for one in came if isinstance(one, m.EvalDone) or is_version(one, newest)]
    assert isinstance(order[0], m.EvalDone)


def test_a_new_epoch_voids_the_groups_of_earlier_ones_and_keeps_its_own(path, parts, tmp_path):
    # A resumed learner's own may be started under the initial model, before it has announced its weights.
    settings = parts.pop("config")
    engine = parts["engine"]
    engine.may_decode = lambda: ("adopted", 1) in engine.events
    ids = [0, GROUPS_PER_EPOCH]
    starts = [m.GroupStart(group_id=each, ordinal=0, attempt=0, seed=0) for each in ids]
    with (
        brokered(m.Welcome(beat_s=1.0, silence_s=PATIENCE_S)) as broker,
        learning(named_weights(load_policy(path).model), tmp_path, "shm", epoch=1) as learner,
        working(broker, settings, parts),
    ):
        broker.send(m.Work(starts=starts))
        broker.send(learner.publish(1))
        came = messages_until(
            broker, lambda came: any(isinstance(one, m.GroupDone) for one in came)
        )
    assert [one.group_id for one in came if isinstance(one, m.GroupDone)] == ids[1:]
    assert {one[1] for one in engine.events if one[0] == "finished"} == set(ids[1:])


@pytest.mark.parametrize(
    ("scores", "mean"),
    # Prompt by prompt, two samples each; the mean is over the samples that have a score.
    [((1.0, None, 0.0, 0.5, None, None), 0.5), ((0.0,) * 6, 0.0), ((None,) * 6, None)],
)
def test_an_evaluation_without_any_score_has_no_mean(parts, scores, mean):
    evaluation = Evaluation(parts["config"], 7, parts["renderer"], lambda _length: 8)
    verdicts = iter(
        Verdict(status="error") if score is None else Verdict(status="scored", score=score)
        for score in scores
    )
    for request_id, sheaf, _ in evaluation.requests:
        for index in range(2):
            sheaf.completions[index] = Completion(
                request_id=request_id, index=index, tokens=np.array([3] * (index + 1), np.int32),
                behaviour_logprobs=np.zeros(index + 1, np.float32),
                version_spans=(VersionSpan(7, 0, index + 1),), finish_reason="stop",
            )  # fmt: skip
            sheaf.verdicts[index] = next(verdicts)
        evaluation.finish(sheaf)
    assert evaluation.done
    result = evaluation.result()
    num_scored = 6 - scores.count(None)
    assert (result.version, result.mean_score, result.mean_tokens) == (7, mean, 1.5)
    assert (result.num_samples, result.num_unscored) == (num_scored, 6 - num_scored)
    assert decode(encode(result))[0] == result


def is_version(message, version):
    return isinstance(message, m.WantWork) and message.version == version


def held(came):
    """(epoch, version) that was last reported."""
    reports = [(one.epoch, one.version) for one in came if isinstance(one, m.WantWork)]
    return reports[-1] if reports else None
