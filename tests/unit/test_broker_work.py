"""One claim a test: who gets which group, and what becomes of it."""

import hashlib

import pytest

from asyncrl.broker.groups import derive_seed
from asyncrl.errors import NoProgressError
from asyncrl.scores import judge
from asyncrl.wire import messages as m
from tests.unit.broker_desk import desk_at_work, kinds, work


def test_work_is_limited_by_credit_and_handed_out_when_credit_opens():
    # F026.
    desk = desk_at_work()
    # k = 1, G = 2: (0 + 1 + 1) * 2 = 4 groups at version 0.
    assert work(desk.want(num_groups=3)) == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]
    assert work(desk.want(num_groups=3)) == [(3, 3, 0)]
    assert desk.want(num_groups=3) == []  # stays open
    desk.say("gen", m.GroupFailed(group_id=1, reason="aborted", retry=False))
    assert work(desk.got("gen")) == [(4, 4, 0)]


def test_a_second_request_replaces_the_first():
    desk = desk_at_work()
    desk.want(num_groups=4)
    desk.want(num_groups=1)
    desk.want(num_groups=2)
    for group_id in range(3):
        desk.say("gen", m.GroupFailed(group_id=group_id, reason="aborted", retry=False))
    # One request was open, for two: the first free credit closes it with one group.
    assert desk.counts.admitted == 5


def test_seeds_follow_from_run_seed_group_and_attempt_alone():
    desk = desk_at_work(seed=12)
    [_, reply] = desk.want(num_groups=1)
    text = (12).to_bytes(8, "big") + bytes(8) + bytes(8)
    digest = hashlib.blake2b(text, digest_size=8, person=b"asyncrl-seed").digest()
    assert reply.starts[0].seed == int.from_bytes(digest, "big") // 2 == derive_seed(12, 0, 0)
    seeds = {derive_seed(r, g, a) for r in range(5) for g in range(5) for a in range(5)}
    assert len(seeds) == 125
    assert all(0 <= s < 2**63 for s in seeds)


def test_no_group_is_admitted_that_no_step_will_train():
    desk = desk_at_work(max_staleness=10, num_steps=3)
    assert len(work(desk.want(num_groups=100))) == 3 * 2
    assert desk.want(num_groups=100) == []


def test_depth_bounds_the_open_groups_and_a_step_reopens_it():
    desk = desk_at_work(max_staleness=10, depth=1)
    assert len(work(desk.want())) == 2
    desk.want()
    desk.done("gen", 0)
    desk.done("gen", 1)
    assert desk.got("gen") == []
    desk.batch(0)
    assert len(work(desk.got("gen"))) == 2


def test_a_full_queue_admits_what_the_next_step_needs_and_no_more():
    # F026.
    desk = desk_at_work(max_staleness=10, max_queue_bytes=10)
    assert len(work(desk.want(num_groups=2))) == 2
    desk.done("gen", 1, frames=[b"123456", b"78901"])  # 11 bytes
    assert desk.want() == []  # 2 groups are open: the step has what it needs
    desk.say("gen", m.GroupFailed(group_id=0, reason="aborted", retry=True))
    assert work(desk.got("gen")) == [(2, 0, 1)]  # exactly the one that the step lacks
    desk.want()
    desk.done("gen", 2)
    desk.batch(0)  # the memory is free again: 6 more groups for steps 1 to 3
    assert len(work(desk.got("gen"))) == 6


def test_two_generators_share_credit_in_the_order_of_their_requests():
    desk = desk_at_work()
    desk.join("gen2")
    desk.want("gen", num_groups=4)
    desk.now_s = 1.0
    desk.want("gen2", num_groups=1)
    desk.now_s = 2.0
    desk.want("gen", num_groups=1)
    desk.say("gen", m.GroupFailed(group_id=0, reason="aborted", retry=True))
    assert work(desk.got("gen2")) == [(4, 0, 1)]
    assert desk.got("gen") == []


def test_what_a_step_frees_is_spread_over_all_who_ask():
    """Whoever asked first could take it all, and engines would work by turns."""
    desk = desk_at_work(groups_per_step=5, max_staleness=10, depth=1)
    names = ["gen", "gen2", "gen3"]
    for name in names[1:]:
        desk.join(name)
    assert len(work(desk.want("gen", num_groups=9))) == 5  # nobody else asks yet
    for name in names:
        desk.now_s += 1
        assert work(desk.want(name, num_groups=9)) == []
    for group_id in range(5):
        desk.done("gen", group_id)
    desk.batch(0)
    # 5 among 3: 5 / 3 rounded up, then 3 / 2 rounded up, then the rest.
    assert [len(work(desk.got(name))) for name in names] == [2, 2, 1]


def test_what_one_cannot_use_goes_to_those_after_it():
    desk = desk_at_work(groups_per_step=6, max_staleness=10, depth=1)
    desk.join("gen2")
    desk.want("gen", num_groups=6)
    desk.want("gen", num_groups=1)
    desk.want("gen2", num_groups=9)
    for group_id in range(6):
        desk.done("gen", group_id)
    desk.batch(0)
    assert [len(work(desk.got(name))) for name in ("gen", "gen2")] == [1, 5]


def test_a_lost_group_is_started_again_first_until_its_attempts_are_used_up():
    # F022.
    desk = desk_at_work()
    desk.want(num_groups=2)
    desk.say("gen", m.GroupFailed(group_id=0, reason="engine_error", retry=True))
    assert work(desk.want(num_groups=2)) == [(2, 0, 1), (3, 2, 0)]
    desk.say("gen", m.GroupFailed(group_id=2, reason="engine_error", retry=True))
    assert work(desk.want(num_groups=1)) == [(4, 0, 2)]
    desk.say("gen", m.GroupFailed(group_id=4, reason="engine_error", retry=True))
    assert work(desk.want(num_groups=1)) == [(5, 3, 0)]  # max_attempts = 3: ordinal 0 is given up
    assert desk.counts.failed == 3


def test_a_prompt_that_can_never_work_is_given_up_at_once():
    desk = desk_at_work()
    desk.want(num_groups=1)
    desk.say("gen", m.GroupFailed(group_id=0, reason="prompt_too_long", retry=False))
    assert work(desk.want(num_groups=1)) == [(1, 1, 0)]


@pytest.mark.parametrize("way", ["bye", "failed_bye", "silence", "unreachable", "malformed"])
def test_groups_of_a_generator_that_goes_are_started_elsewhere_oldest_first(way):
    desk = desk_at_work()
    desk.join("gen2")
    desk.want(num_groups=4)
    desk.done("gen", 1)
    desk.want("gen2", num_groups=8)
    desk.sent.clear()
    match way:
        case "bye":
            desk.say("gen", m.Bye(reason="moved"))
        case "failed_bye":
            desk.say("gen", m.Bye(reason="crash", failed=True))
        case "silence":
            desk.tick(10.5, "gen2", "learner")
        case "unreachable":
            desk.deliver(desk.broker.unreachable(b"gen", 0.0))
        case "malformed":
            desk.deliver(desk.broker.malformed(b"gen", "rubbish", 0.0))
            assert desk.got("gen") == [m.Stop(reason="rubbish", failed=True)]
    # Group 1 was finished and stays; the evaluation that gen was given moves too.
    assert kinds(desk.got("gen2")) == ["evaluate", "work"]
    assert work(desk.got("gen2")) == [(4, 0, 1), (5, 2, 1), (6, 3, 1)]
    assert desk.broker.over is None
    assert kinds(desk.say("gen", m.Beat())) == ["refuse"]


def test_twenty_deaths_with_every_credit_in_hand_leak_none():
    # F024.
    desk = desk_at_work(groups_per_step=8, max_attempts=100)  # 16 credits at version 0
    desk.say("gen", m.Bye(reason="warm-up"))
    for death in range(20):
        desk.join(f"gen{death}")
        assert len(work(desk.want(f"gen{death}", num_groups=32))) == 16
        desk.tick(1.0, "learner")
        desk.say(f"gen{death}", m.Bye(reason="killed", failed=True))
    assert desk.counts.model_dump() | {"failed": 0, "admitted": 0} == dict.fromkeys(
        m.LedgerCounts.model_fields, 0
    )
    assert (desk.counts.admitted, desk.counts.failed) == (320, 320)


def test_an_overdue_group_is_started_again_and_its_late_result_is_only_counted():
    # F024.
    desk = desk_at_work()
    desk.join("gen2")
    desk.want(num_groups=1)
    desk.want("gen2", num_groups=1)
    desk.want("gen2", num_groups=1)
    desk.want("gen2", num_groups=1)
    desk.want("gen2", num_groups=1)
    for _ in range(10):
        desk.tick(9.9, "gen", "gen2", "learner")
    desk.done("gen2", 1)
    desk.done("gen2", 2)
    desk.done("gen2", 3)
    desk.tick(1.0, "gen", "gen2", "learner")  # 100 s: group 0 is overdue
    assert work(desk.got("gen2")) == [(4, 0, 1)]
    before = desk.counts
    desk.done("gen", 0, frames=[b"late"])
    assert desk.counts == before
    assert desk.broker.status(desk.now_s)["late_groups"] == 1
    desk.batch(0)
    assert b"late" not in desk.sent["learner"][-1][1]


def test_only_the_holder_finishes_a_group_and_only_once():
    desk = desk_at_work()
    desk.join("gen2")
    desk.want(num_groups=2)
    desk.done("gen2", 0, frames=[b"forged"])
    desk.say("gen2", m.GroupFailed(group_id=0, reason="aborted", retry=False))
    assert (desk.counts.queued, desk.counts.failed) == (0, 0)
    desk.done("gen", 0, frames=[b"real"])
    desk.done("gen", 0, frames=[b"twice"])
    desk.say("gen", m.GroupFailed(group_id=0, reason="aborted", retry=True))
    assert (desk.counts.queued, desk.counts.failed) == (1, 0)
    assert desk.broker.status(0.0)["late_groups"] == 4
    desk.done("gen", 1, frames=[b"other"])
    desk.batch(0)
    assert desk.sent["learner"][-1][1] == [b"real", b"other"]


def test_a_group_without_any_score_is_a_lost_attempt():
    desk = desk_at_work()
    desk.want(num_groups=1)
    desk.done("gen", 0, scores=(None, None))
    assert desk.counts.failed == 1
    assert work(desk.want(num_groups=1)) == [(1, 0, 1)]


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ([0.0, 1.0], "signal"),
        ([1.0, 1.0], "zero_signal"),
        ([1.0, 1.0 + 5e-7], "zero_signal"),
        ([1.0, 1.0 + 2e-6], "signal"),
        ([None, 1.0], "zero_signal"),  # one score has nothing to be compared with
        ([None, 0.0, 1.0], "signal"),
        ([None, None], "unscored"),
        ([float("nan"), float("inf")], "unscored"),
    ],
)
def test_equal_scores_teach_nothing_and_missing_ones_say_nothing(scores, verdict):
    assert judge(scores) == verdict


def test_zero_signal_groups_are_trained_unless_they_shall_be_dropped():
    desk = desk_at_work(zero_signal="keep")
    desk.want(num_groups=1)
    desk.done("gen", 0, scores=(1.0, 1.0))
    assert (desk.counts.queued, desk.counts.dropped_filtered) == (1, 0)


def test_a_dropped_zero_signal_group_returns_its_credit_and_another_prompt_is_drawn():
    desk = desk_at_work(zero_signal="drop")
    desk.want(num_groups=4)
    desk.want(num_groups=1)
    desk.done("gen", 1, scores=(1.0, 1.0))
    assert work(desk.got("gen")) == [(4, 4, 0)]
    assert (desk.counts.failed, desk.counts.dropped_filtered) == (0, 1)
    desk.done("gen", 0)
    desk.done("gen", 2)
    [batch] = desk.batch(0)
    assert [ref.group_id for ref in batch.groups] == [0, 2]
    assert batch.cursor == 3  # ordinal 1 is done with and does not pin the cursor


def test_the_run_ends_when_too_many_groups_in_a_row_carry_no_signal():
    desk = desk_at_work(zero_signal="drop", max_zero_signal_in_a_row=3)

    def finish(group_id, scores):
        desk.want(num_groups=1)
        desk.done("gen", group_id, scores=scores)

    finish(0, (1.0, 1.0))
    finish(1, (1.0, 1.0))
    finish(2, (0.0, 1.0))  # starts the count anew
    finish(3, (0.0, 0.0))
    finish(4, (0.0, 0.0))
    assert desk.broker.over is None
    finish(5, (1.0, 1.0))
    assert isinstance(desk.broker.failure, NoProgressError)
    for name in ("gen", "learner"):
        [stop] = desk.got(name)
        assert stop.failed
        assert "difficulty" in stop.reason
