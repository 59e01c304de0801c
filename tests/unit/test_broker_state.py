"""One claim a test: who may join the broker, and how a run ends."""

import pytest

from asyncrl.errors import NoProgressError, PeerLostError, ProtocolError
from asyncrl.wire import messages as m
from tests.unit.broker_desk import Desk, desk_at_work, kinds, work


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"run_id": "run-b"}, ["run-a", "run-b"]),
        ({"config_digest": "beef"}, ["cafe", "beef"]),
        ({"protocol": 99}, ["99", str(m.PROTOCOL)]),
        ({"token": "wrong-token"}, ["token"]),
    ],
)
def test_a_stranger_is_refused_with_both_values_and_without_the_token(fields, values):
    [refusal] = Desk().join(**fields)
    assert refusal.kind == "refuse"
    assert all(value in refusal.reason for value in values)
    assert "secret" not in refusal.reason
    assert "wrong-token" not in refusal.reason


def test_a_stranger_without_the_token_learns_nothing_of_the_run():
    [refusal] = Desk().join(token="x", run_id="run-b", config_digest="beef")
    assert "run-a" not in refusal.reason
    assert "cafe" not in refusal.reason


def test_a_name_is_taken_while_its_peer_lives_and_free_once_it_is_lost():
    desk = desk_at_work()
    hello = m.Hello(
        role="generator", name="gen", run_id="run-a", config_digest="cafe", token="secret"
    )
    [refusal] = desk.say("other-socket", hello)
    assert "'gen' lives" in refusal.reason
    desk.tick(10.5, "learner")
    assert kinds(desk.say("other-socket", hello)) == ["welcome"]


def test_a_generator_started_again_replaces_the_one_that_is_not_known_to_be_dead_yet():
    desk = desk_at_work()
    assert work(desk.want(num_groups=2)) == [(0, 0, 0), (1, 1, 0)]
    hello = m.Hello(
        role="generator",
        name="gen",
        run_id="run-a",
        config_digest="cafe",
        token="secret",
        incarnation=1,
    )
    assert kinds(desk.say("gen-again", hello)) == ["welcome"]
    received = desk.want("gen-again", num_groups=3)
    assert kinds(received) == ["evaluate", "work"]
    assert work(received) == [(2, 0, 1), (3, 1, 1), (4, 2, 0)]
    assert kinds(desk.say("gen", m.Beat())) == ["refuse"]
    assert len(desk.broker.peers) == 2


def test_a_second_learner_is_refused_while_the_first_lives():
    desk = desk_at_work()
    [refusal] = desk.join("learner2", "learner", epoch=5)
    assert "'learner' lives" in refusal.reason
    assert kinds(desk.batch(0)) == []  # the first one goes on


def test_hello_said_twice_is_welcomed_twice():
    desk = desk_at_work()
    assert kinds(desk.join()) == ["welcome"]
    assert len(desk.broker.peers) == 2


def test_a_generator_that_came_first_waits_and_gets_work_when_the_learner_joins():
    desk = Desk()
    desk.join()
    assert desk.want() == []
    desk.join("learner", "learner", version=3, cursor=11)
    assert kinds(desk.got("gen")) == []  # version 0 has no credit at version 3: (0 + 2) * 2 < 6
    desk.announce(3)
    assert kinds(desk.got("gen")) == ["announcement"]
    assert work(desk.want(version=3)) == [(0, 11, 0), (1, 12, 0)]  # 4 steps: one is left


def test_a_late_generator_is_told_the_newest_version_in_its_welcome():
    desk = Desk()
    desk.join("learner", "learner", version=2)
    desk.announce(2)
    [welcome] = desk.join()
    assert welcome.announcement.version == 2
    assert kinds(desk.want(version=2)) == ["evaluate", "work"]  # and is not told again


def test_who_never_said_hello_is_refused():
    desk = Desk()
    assert kinds(desk.want("ghost")) == ["refuse"]
    assert desk.say("ghost", m.Bye(reason="x")) == []


def test_after_the_last_step_the_learners_bye_stops_everyone():
    desk = Desk(num_steps=4)
    desk.join("learner", "learner", version=4)
    desk.join()
    desk.say("learner", m.Bye(reason="done"))
    [stop] = desk.got("gen")
    assert not stop.failed
    assert desk.broker.failure is None
    assert kinds(desk.say("gen", m.Beat())) == ["stop"]  # again to whoever still speaks
    assert kinds(desk.join("late")) == ["refuse"]
    desk.say("gen", m.Bye(reason="stopped"))
    assert len(desk.broker.peers) == 0


@pytest.mark.parametrize("way", ["failed", "silence", "unreachable", "malformed"])
def test_a_lost_learner_stops_everyone_as_failed(way):
    desk = desk_at_work()
    match way:
        case "failed":
            desk.say("learner", m.Bye(reason="CUDA error", failed=True))
            assert "CUDA error" in desk.broker.over.reason
        case "silence":
            desk.tick(10.5, "gen")
        case "unreachable":
            desk.deliver(desk.broker.unreachable(b"learner", 0.0))
        case "malformed":
            desk.deliver(desk.broker.malformed(b"learner", "rubbish", 0.0))
    assert desk.got("gen")[-1].failed
    assert isinstance(desk.broker.failure, PeerLostError | ProtocolError)


def test_a_beat_keeps_a_peer_alive_and_is_answered():
    desk = desk_at_work()
    for _ in range(10):
        desk.tick(9.9, "gen", "learner")
        assert [message.kind for message, _ in desk.sent["gen"]] == ["beat"]
    assert len(desk.broker.peers) == 2


def test_waiting_too_long_ends_the_run_naming_groups_and_holders():
    desk = desk_at_work()
    desk.want(num_groups=1)
    desk.now_s = 8.0
    desk.batch(0)
    desk.now_s = 9.0
    for _ in range(6):
        desk.tick(8.0, "gen", "learner")
    assert desk.broker.over is None  # asked 49 s ago
    desk.tick(1.0, "gen", "learner")
    [stop] = desk.got("gen")
    assert stop == desk.got("learner")[0]
    assert isinstance(desk.broker.failure, NoProgressError)
    for text in ("group 0 at gen since 58 s", "1 not started", "pipeline.no_progress_s", "step 0"):
        assert text in stop.reason


def test_waiting_too_long_says_what_kept_failing():
    desk = desk_at_work()
    desk.want(num_groups=1)
    desk.batch(0)
    desk.say("gen", m.Counters(values={"verdict/error": 64.0, "verdict/scored": 8.0}))
    for _ in range(7):
        desk.tick(8.0, "gen", "learner")
    [stop] = desk.got("gen")
    assert "so far 64 scorings failed" in stop.reason
    assert "timed out" not in stop.reason


@pytest.mark.parametrize(
    ("roles", "text"),
    [([], "no learner has joined"), (["learner"], "no generator has joined")],
)
def test_waiting_for_who_never_joins_ends_the_run_saying_so(roles, text):
    desk = Desk()
    for role in roles:
        desk.join(role, role)
        desk.batch(0)
    for _ in range(5):
        desk.tick(10.0, *roles)
    assert text in desk.broker.over.reason


def test_a_learner_that_left_and_does_not_return_ends_the_run():
    desk = desk_at_work()
    desk.say("learner", m.Bye(reason="moving"))
    for _ in range(5):
        desk.tick(10.0, "gen")
    assert desk.got("gen")[-1].failed
    assert "none has returned" in desk.broker.over.reason


def test_a_training_learner_is_not_waiting_however_long_it_takes():
    desk = desk_at_work()
    for _ in range(20):
        desk.tick(9.0, "gen", "learner")
    assert desk.broker.over is None


@pytest.mark.parametrize("name", ["gen", "learner"])
def test_a_message_of_the_wrong_role_expels_its_sender(name):
    desk = desk_at_work()
    message = m.WantBatch(step=0) if name == "gen" else m.WantWork(epoch=0, version=0, num_groups=1)
    assert kinds(desk.say(name, message)) == ["stop"]
