"""One claim a test: batches, versions, evaluations, and a learner that comes back."""

import pytest

from asyncrl.broker.evals import EvalSchedule
from asyncrl.errors import ProtocolError
from asyncrl.types import GROUPS_PER_EPOCH
from asyncrl.wire import messages as m
from tests.unit.broker_desk import Desk, desk_at_work, evaluated, kinds, work


def test_a_batch_holds_the_first_groups_in_order_their_frames_and_the_closed_books():
    # F027, F091.
    desk = desk_at_work()
    desk.want(num_groups=4)
    assert desk.batch(0) == []
    desk.done("gen", 2, frames=[b"c"])
    desk.done("gen", 3, frames=[b"d"])
    desk.now_s = 2.0
    desk.done("gen", 1, frames=[b"b1", b"b2"])
    assert desk.got("learner") == []  # group 0 is waited for, not skipped
    desk.say("gen", m.Counters(values={"tokens": 5.0, "spans": 1.0}))
    desk.now_s = 5.0
    desk.done("gen", 0, frames=[b"a"])
    [batch] = desk.got("learner")
    assert desk.sent["learner"][0][1] == [b"a", b"b1", b"b2"]
    assert [(g.group_id, g.generator, g.num_frames, g.queued_s) for g in batch.groups] == [
        (0, "gen", 1, 0.0),
        (1, "gen", 2, 3.0),
    ]
    assert batch.step == 0
    assert batch.cursor == 2
    assert batch.counters == {"tokens": 5.0, "spans": 1.0}
    assert batch.ledger == desk.counts
    assert (batch.ledger.trained, batch.ledger.queued, batch.ledger.admitted) == (2, 2, 4)
    assert desk.batch(1)[0].step == 1


def test_the_cursor_waits_for_a_lost_prompt_and_passes_one_that_was_given_up():
    desk = desk_at_work(max_attempts=2)
    desk.want(num_groups=4)
    desk.say("gen", m.GroupFailed(group_id=0, reason="aborted", retry=True))
    desk.done("gen", 1)
    desk.done("gen", 2)
    [batch] = desk.batch(0)
    assert batch.cursor == 0
    assert work(desk.want(num_groups=1)) == [(4, 0, 1)]
    desk.say("gen", m.GroupFailed(group_id=4, reason="aborted", retry=True))
    assert work(desk.want(num_groups=1)) == [(5, 4, 0)]
    desk.done("gen", 3)
    desk.done("gen", 5)
    [batch] = desk.batch(1)
    assert batch.cursor == 5


def test_counters_of_a_lost_generator_still_count():
    desk = desk_at_work()
    desk.join("gen2")
    desk.say("gen2", m.Counters(values={"tokens": 1.0}))
    desk.say("gen2", m.Counters(values={"tokens": 7.0}))  # running totals: the last one counts
    desk.say("gen2", m.Bye(reason="x"))
    desk.say("gen", m.Counters(values={"tokens": 4.0}))
    desk.want(num_groups=2)
    desk.done("gen", 0)
    desk.done("gen", 1)
    assert desk.batch(0)[0].counters == {"tokens": 11.0}


def test_a_batch_brings_the_brokers_own_counters_too():
    desk = desk_at_work()
    desk.say("gen", m.Counters(values={"tokens": 4.0}))
    desk.broker.peers.broker_counters = {"broker/idle": 3.0, "broker/other": 1.0}
    desk.want(num_groups=2)
    desk.done("gen", 0)
    desk.done("gen", 1)
    expected = {"tokens": 4.0, "broker/idle": 3.0, "broker/other": 1.0}
    assert desk.batch(0)[0].counters == expected


@pytest.mark.parametrize(("step", "values"), [(1, ["step 1", "step 0"]), (3, ["step 3", "step 0"])])
def test_a_learner_out_of_step_with_the_ledger_ends_the_run_with_both_values(step, values):
    # F027.
    desk = desk_at_work()
    [stop] = desk.batch(step)
    assert stop.failed
    assert all(value in stop.reason for value in values)
    assert isinstance(desk.broker.failure, ProtocolError)


def test_no_batch_exists_after_the_last_step():
    desk = Desk()
    desk.join("learner", "learner", version=4)
    [stop] = desk.batch(4)
    assert "num_steps" in stop.reason


def test_an_open_request_is_answered_by_the_announcement_so_that_k_0_goes_on():
    desk = desk_at_work(max_staleness=0)
    desk.want(num_groups=2)
    evaluated(desk)
    desk.want()
    desk.done("gen", 0)
    desk.done("gen", 1)
    desk.batch(0)
    assert desk.got("gen") == []  # at k = 0 version 0 may start nothing more
    desk.announce(1)
    assert kinds(desk.got("gen")) == ["announcement"]
    assert desk.want() == []  # told once; still at version 0
    assert work(desk.want(version=1)) == [(2, 2, 0), (3, 3, 0)]


def test_an_announcement_closes_the_request_so_that_work_waits_for_the_next_one():
    desk = desk_at_work()
    desk.join("gen2")
    desk.want("gen2", num_groups=4)
    desk.want(num_groups=1)
    desk.done("gen2", 0)
    desk.done("gen2", 1)
    desk.batch(0)
    desk.announce(1)
    assert kinds(desk.got("gen")) == ["announcement"]
    desk.say("gen2", m.Bye(reason="x", failed=True))  # two credits return
    assert desk.got("gen") == []
    assert work(desk.want(version=1, num_groups=1)) == [(4, 2, 1)]


def test_a_busy_generator_hears_of_a_version_once_with_its_next_beat():
    desk = desk_at_work()
    desk.want(num_groups=2)
    desk.done("gen", 0)
    desk.done("gen", 1)
    desk.batch(0)
    desk.announce(1)
    assert desk.got("gen") == []
    assert kinds(desk.say("gen", m.Beat())) == ["announcement"]
    assert [message.kind for message, _ in desk.sent["gen"]] == ["announcement", "beat"]
    assert desk.say("gen", m.Beat()) == []


@pytest.mark.parametrize(("epoch", "version"), [(0, 1), (1, 0), (0, 0)])
def test_an_announcement_must_be_newer_and_of_a_step_that_was_taken(epoch, version):
    desk = desk_at_work()
    if (epoch, version) == (0, 0):
        assert desk.announce(0) == []
    [stop] = desk.announce(version, epoch)
    assert stop.failed
    assert isinstance(desk.broker.failure, ProtocolError)


@pytest.mark.parametrize(("epoch", "version"), [(0, 1), (1, 0)])
def test_a_generator_that_reports_weights_that_cannot_exist_is_stopped_alone(epoch, version):
    desk = desk_at_work()
    [stop] = desk.want(epoch=epoch, version=version)
    assert stop.failed
    assert desk.broker.over is None
    assert len(desk.broker.peers.generators) == 0


@pytest.mark.parametrize("oldest", [0, 2])
def test_a_group_older_than_its_start_or_from_the_future_never_enters(oldest):
    # F026.
    desk = Desk()
    desk.join("learner", "learner", version=1)
    desk.join()
    desk.announce(1)
    assert work(desk.want(version=1, num_groups=1)) == [(0, 0, 0)]
    assert kinds(desk.done("gen", 0, version=oldest)) == ["stop"]
    assert (desk.counts.queued, desk.counts.failed) == (0, 1)


def test_a_learner_that_returns_gets_fresh_books_at_its_version_and_nothing_of_before():
    desk = desk_at_work()
    desk.want(num_groups=4)
    evaluated(desk)
    desk.done("gen", 0)
    desk.done("gen", 1)
    desk.done("gen", 2)
    desk.batch(0)
    desk.announce(1)
    desk.say("gen", m.Beat())
    desk.say("learner", m.Bye(reason="moving"))
    assert desk.broker.over is None
    assert desk.want(version=1) == []  # nobody works without a learner
    [refusal] = desk.join("learner", "learner", epoch=0, version=1, cursor=2)
    assert "higher epoch" in refusal.reason
    assert kinds(desk.join("learner", "learner", epoch=1, version=1, cursor=2)) == ["welcome"]
    assert desk.got("gen") == []  # (0, 1) is not a version of this epoch
    assert (desk.counts.admitted, desk.counts.trained, desk.counts.queued) == (2, 2, 0)
    desk.announce(1, epoch=1)
    assert kinds(desk.got("gen")) == ["announcement"]
    started = work(desk.want(epoch=1, version=1))
    first = GROUPS_PER_EPOCH  # ids never come again, not even after the broker was replaced too
    assert started == [(first + i, 2 + i, 0) for i in range(4)]
    desk.done("gen", 3)  # of the earlier epoch
    assert desk.counts.queued == 0
    assert desk.broker.status(0.0)["late_groups"] == 1


def test_weights_of_an_earlier_epoch_that_are_on_their_way_bar_a_generator_from_work():
    desk = desk_at_work()
    desk.want(num_groups=2)
    evaluated(desk)
    desk.done("gen", 0)
    desk.done("gen", 1)
    desk.batch(0)
    desk.announce(1)
    desk.say("gen", m.Beat())  # offers (0, 1)
    desk.say("learner", m.Bye(reason="moving"))
    desk.join("learner", "learner", epoch=1)
    # It reports the initial model, but may have adopted (0, 1) by the time that work arrives.
    assert desk.want(version=0) == []
    desk.announce(0, epoch=1)
    assert desk.want(version=0) == []
    assert kinds(desk.want(epoch=1, version=0)) == ["evaluate", "work"]


def test_the_initial_model_of_an_earlier_epoch_may_sample():
    desk = Desk()
    desk.join("learner", "learner", epoch=3)
    desk.join()
    assert kinds(desk.want(epoch=0, version=0)) == ["evaluate", "work"]


def test_one_generator_at_a_time_evaluates_before_any_work():
    desk = desk_at_work()
    desk.join("gen2")
    assert kinds(desk.want(num_groups=1)) == ["evaluate", "work"]
    assert kinds(desk.want("gen2", num_groups=1)) == ["work"]


def take_step(desk, step):
    """Train one step at k = 1 and let gen adopt; returns what gen receives for its report."""
    desk.want(version=step, num_groups=2)
    start = desk.broker.epoch.groups.next_id - 2
    desk.done("gen", start, version=step)
    desk.done("gen", start + 1, version=step)
    [batch] = desk.batch(step)
    desk.announce(step + 1)
    desk.say("gen", m.Beat())
    return batch, desk.want(version=step + 1, num_groups=2)


def test_evaluations_are_due_at_the_first_version_every_n_steps_and_at_the_last():
    # F090.
    desk = desk_at_work(eval_every_steps=2, num_steps=5, depth=1)
    assert kinds(desk.want(num_groups=2)) == ["evaluate", "work"]
    evaluated(desk, version=0)
    due = []
    for step in range(5):
        batch, received = take_step(desk, step)
        assert [e.version for e in batch.evals] == ([step] if step in (0, 2, 4) else [])
        if "evaluate" in kinds(received):
            due.append(step + 1)
            evaluated(desk, version=step + 1)
    assert due == [2, 4, 5]


def result(version):
    return m.EvalDone(
        version=version, mean_score=0.5, num_samples=4, num_unscored=0, mean_tokens=3.0, seconds=1.0
    )


@pytest.mark.parametrize(
    ("first", "reported", "due"),
    [
        (15, range(15, 46), [15, 20, 40, 45]),  # resumed between two multiples
        (20, range(20, 46), [20, 40, 45]),
        # Versions that no generator reports: 20 is made up for at 23, and 40 is no later for it.
        (0, [0, 3, 19, 23, 39, 40, 45], [0, 23, 40, 45]),
    ],
)
def test_evaluations_fall_on_multiples_wherever_the_run_began(first, reported, due):
    schedule = EvalSchedule(every_steps=20, num_steps=45, first_version=first)
    found = []
    for version in reported:
        if schedule.is_due(version):
            schedule.assign(b"gen", version)
            schedule.finish(b"gen", result(version))
            found.append(version)
    assert found == due


def test_with_0_nothing_is_evaluated_between_the_first_and_the_last_version():
    desk = desk_at_work(eval_every_steps=0, num_steps=3, depth=1)
    desk.want(num_groups=2)
    evaluated(desk, version=0)
    received = [kinds(take_step(desk, step)[1]) for step in range(3)]
    assert ["evaluate" in r for r in received] == [False, False, True]


def test_the_learner_waits_for_the_last_evaluation_and_gets_it_at_once_when_it_is_done():
    desk = desk_at_work(num_steps=1)
    desk.want(num_groups=2)
    evaluated(desk, version=0)
    _, received = take_step(desk, 0)
    assert received == [m.Evaluate(version=1)]
    assert desk.say("learner", m.WantEval(version=1)) == []
    evaluated(desk, version=1)
    [results] = desk.got("learner")
    assert [e.version for e in results.evals] == [1]
    assert desk.say("learner", m.WantEval(version=1)) == [m.EvalResults(evals=[])]


def test_the_evaluation_of_a_lost_generator_is_due_again_also_for_a_busy_one():
    desk = desk_at_work()
    desk.join("gen2")
    desk.want(num_groups=1)
    desk.want("gen2", num_groups=1)
    desk.say("gen", m.Bye(reason="x", failed=True))
    assert kinds(desk.say("gen2", m.Beat())) == ["evaluate"]
    assert desk.say("gen2", m.Beat()) == []


def test_nothing_is_evaluated_while_newer_weights_are_on_their_way_to_the_generator():
    # F090.
    # It could have adopted them when Evaluate arrives, and then does not hold that version.
    desk = desk_at_work()
    desk.join("gen2")
    assert kinds(desk.want("gen2", num_groups=1)) == ["evaluate", "work"]
    desk.want(num_groups=1)
    desk.done("gen2", 0)
    desk.done("gen", 1)
    desk.batch(0)
    desk.announce(1)
    desk.say("gen", m.Beat())
    desk.say("gen2", m.Bye(reason="x", failed=True))  # the evaluation is due again
    assert kinds(desk.want(version=0, num_groups=1)) == ["work"]
    assert kinds(desk.want(version=1, num_groups=1)) == ["evaluate", "work"]


def test_a_generator_that_still_evaluates_for_an_earlier_learner_is_not_asked_again():
    desk = desk_at_work()
    assert kinds(desk.want(num_groups=1)) == ["evaluate", "work"]
    desk.say("learner", m.Bye(reason="moving"))
    desk.join("learner", "learner", epoch=1)
    assert kinds(desk.want(num_groups=1)) == ["work"]
    evaluated(desk, version=0)  # of the earlier epoch: not recorded
    assert kinds(desk.say("gen", m.Beat())) == ["evaluate"]


def test_the_learner_lowers_the_bound_and_open_groups_keep_their_promise():
    desk = desk_at_work(max_staleness=2, num_steps=8)
    assert len(work(desk.want(num_groups=8))) == 6  # (0 + 2 + 1) * 2
    desk.want(num_groups=8)
    assert desk.say("learner", m.SetStaleness(max_staleness=0)) == []
    for step in range(3):
        desk.done("gen", 2 * step)
        desk.done("gen", 2 * step + 1)
        assert desk.batch(step)[0].max_staleness == 2
    # 6 charged; under 0 the version 3 has (3 + 0 + 1) * 2 - 6 = 2 credits, the versions before none.
    desk.announce(3)
    assert work(desk.want(version=3)) == [(6, 6, 0), (7, 7, 0)]
    desk.done("gen", 6, version=3)
    desk.done("gen", 7, version=3)
    assert desk.batch(3)[0].max_staleness == 0


def test_a_raised_bound_answers_a_waiting_request_at_once():
    desk = desk_at_work(max_staleness=2, num_steps=8)
    desk.say("learner", m.SetStaleness(max_staleness=0))
    assert len(work(desk.want(num_groups=8))) == 2
    assert desk.want(num_groups=8) == []
    desk.say("learner", m.SetStaleness(max_staleness=1))
    assert len(work(desk.got("gen"))) == 2


def test_a_bound_beyond_the_configured_one_ends_the_run_with_both_values():
    desk = desk_at_work(max_staleness=1)
    [stop] = desk.say("learner", m.SetStaleness(max_staleness=2))
    assert stop.failed
    assert "bound of 2" in stop.reason
    assert "0..1 (pipeline.max_staleness)" in stop.reason


def test_a_learner_that_returns_starts_at_the_configured_bound():
    desk = desk_at_work(max_staleness=1)
    desk.say("learner", m.SetStaleness(max_staleness=0))
    desk.say("learner", m.Bye(reason="moving"))
    desk.join("learner", "learner", epoch=1)
    assert len(work(desk.want(num_groups=8))) == 4  # (0 + 1 + 1) * 2


def test_a_generator_may_not_set_the_bound():
    desk = desk_at_work()
    [stop] = desk.say("gen", m.SetStaleness(max_staleness=0))
    assert "set_staleness" in stop.reason
