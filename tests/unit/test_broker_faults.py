"""Whole stories at the broker's desk, in scripted time: slow prompts, deaths, floods."""

from asyncrl.wire import messages as m
from tests.unit.broker_desk import desk_at_work, evaluated, kinds, work


def test_slow_prompts_get_exactly_their_share_of_the_data():
    # F022: every fifth prompt takes ten times as long; k = 2, 200 steps of 5 groups.
    desk = desk_at_work(max_staleness=2, groups_per_step=5, num_steps=200, no_progress_s=1e9)
    evaluated(desk)
    finish_at, version, trained = {}, 0, []
    wanted = desk.want(num_groups=15)
    desk.batch(0)
    for time in range(100_000):
        for group_id, ordinal, attempt in work(wanted):
            assert attempt == 0  # nothing is generated twice
            finish_at[group_id] = time + (10 if ordinal % 5 == 0 else 1)
        for group_id in [g for g, end in finish_at.items() if end == time]:
            del finish_at[group_id]
            desk.done("gen", group_id, version=version)
            for batch in (x for x in desk.got("learner") if x.kind == "batch"):
                trained += [ref.group_id for ref in batch.groups]
                version += 1
                desk.announce(version)
                if version < 200:
                    desk.batch(version)
        if version == 200:
            break
        wanted = desk.want(num_groups=15, version=version)
    # First started, first trained: group ids are ordinals here, and each is trained exactly once.
    assert trained == list(range(1000))
    assert (
        sum(ordinal % 5 == 0 for ordinal in trained) == 200
    )  # 20 % of the data, as of the prompts
    assert (desk.counts.dropped_stale, desk.counts.failed) == (0, 0)


def test_credits_are_whole_after_twenty_deaths_and_a_failure_in_ten():
    # F024: the 21st generator is given as many groups as the first.
    desk = desk_at_work(max_staleness=7, num_steps=1000, max_attempts=100)  # 8 * 2 = 16 credits
    evaluated(desk)
    assert len(work(desk.want(num_groups=16))) == 16
    for death in range(20):
        desk.say("gen" if death == 0 else f"gen-{death}", m.Bye(reason="killed", failed=True))
        name = f"gen-{death + 1}"
        desk.join(name=name)
        given = work(desk.want(name, num_groups=16))
        assert len(given) == 16
        desk.say(name, m.GroupFailed(group_id=given[3][0], reason="engine_error", retry=True))
        assert len(work(desk.want(name, num_groups=16))) == 1  # its credit came back at once
        assert (desk.counts.in_flight, desk.counts.queued) == (16, 0)


def test_a_flood_of_groups_that_nobody_asked_for_trains_nothing():
    # F026: 5,000 submissions while the learner is busy; then it asks.
    desk = desk_at_work(max_queue_bytes=2**20)
    evaluated(desk)
    given = work(desk.want(num_groups=2))
    before = desk.counts
    for group_id in range(1000, 6000):
        desk.done("gen", group_id)
    assert desk.counts == before
    assert desk.broker.status(0.0)["late_groups"] == 5000  # each is counted
    assert desk.broker.status(0.0)["queued_bytes"] == 0
    for group_id, _, _ in given:
        desk.done("gen", group_id)
    [batch] = desk.batch(0)
    assert kinds([batch]) == ["batch"]
    assert [ref.group_id for ref in batch.groups] == [group_id for group_id, _, _ in given]
