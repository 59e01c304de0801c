"""drops.jsonl: each group that left untrained, with its reason."""

import base64
import json
from dataclasses import replace

from asyncrl.broker.drops import MAX_PAYLOAD_BYTES, DropLog
from asyncrl.broker.journal import Drop
from asyncrl.broker.state import Broker
from asyncrl.wire import messages as m
from tests.unit.broker_desk import SETTINGS, Desk, work


def desk_with_log(path, *, num_payloads=1, learner=None, **changes):
    desk = Desk()
    log = DropLog(path, num_payloads=num_payloads)
    desk.broker = Broker(replace(SETTINGS, **changes), journal=log)
    desk.join("learner", "learner", **(learner or {}))
    desk.join("gen")
    return desk, log


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_way_out_is_on_record_with_its_own_reason(tmp_path):
    path = tmp_path / "drops.jsonl"
    desk, log = desk_with_log(path, zero_signal="drop", depth=4, max_attempts=2)
    desk.want(num_groups=4)
    desk.done("gen", 0, scores=(1.0, 1.0), frames=[b"zero"])
    desk.done("gen", 1, scores=(None, None))
    desk.say("gen", m.GroupFailed(group_id=2, reason="prompt_too_long", retry=False))
    desk.say("gen", m.Bye(reason="leaves"))
    desk.join("other")
    desk.want("other", num_groups=1)
    desk.tick(SETTINGS.group_timeout_s, "learner", "other")
    log.close()
    found = [(d["group_id"], d["reason"], d["again"], d["generator"]) for d in written(path)]
    assert found == [
        (0, "zero_signal", False, "gen"),
        (1, "unscored", True, "gen"),
        (2, "prompt_too_long", False, "gen"),
        (3, "generator_lost", True, "gen"),
        (4, "timeout", False, "other"),  # the second and last attempt of prompt 3
    ]
    first = written(path)[0]
    assert (first["scores"], first["version"], first["ordinal"]) == ([1.0, 1.0], 0, 0)
    assert [base64.b64decode(frame) for frame in first["payload"]] == [b"zero"]
    counts = desk.counts
    assert counts.dropped_filtered + counts.failed == len(found)


def drop(group_id, version, *, frames=(b"x",), scores=(1.0,)):
    start = m.GroupStart(group_id=group_id, ordinal=group_id, attempt=0, seed=1)
    return Drop(
        start=start, reason="zero_signal", version=version, holder="g", again=False, scores=scores,
        frames=frames,
    )  # fmt: skip


def test_payloads_are_kept_of_the_first_few_of_each_version_unless_they_are_huge(tmp_path):
    log = DropLog(tmp_path / "drops.jsonl", num_payloads=2)
    huge = bytes(MAX_PAYLOAD_BYTES + 1)
    for group_id, version, frames in (
        (0, 0, [b"a"]), (1, 0, [huge]), (2, 0, [b"c"]), (3, 0, [b"d"]), (4, 1, [b"e"]), (5, 1, []),
    ):  # fmt: skip
        log.dropped(drop(group_id, version, frames=frames))
    log.close()
    kept = [d["group_id"] for d in written(tmp_path / "drops.jsonl") if "payload" in d]
    assert kept == [0, 2, 4]


def test_a_score_that_is_no_number_does_not_end_the_broker(tmp_path):
    log = DropLog(tmp_path / "drops.jsonl", num_payloads=0)
    log.dropped(drop(0, 0, scores=(float("nan"), None, 0.5, float("inf"))))
    log.close()
    assert written(tmp_path / "drops.jsonl")[0]["scores"] == [None, None, 0.5, None]


def test_a_learner_that_comes_back_sets_aside_what_was_dropped_in_steps_it_makes_again(tmp_path):
    path = tmp_path / "drops.jsonl"
    log = DropLog(path, num_payloads=0)
    for version in range(4):
        log.dropped(drop(version, version))
    log.opened(epoch=1, version=2, cursor=0)
    log.dropped(drop(9, 2))
    log.close()
    assert [d["group_id"] for d in written(path)] == [0, 1, 9]
    aside = path.with_name("drops.jsonl.set-aside")
    assert [d["group_id"] for d in written(aside)] == [2, 3]


def check_steps(desk, path, steps):
    """Each step loses a group to zero signal and one to a failure, and trains two of the four."""
    for step in steps:
        starts = work(desk.want(num_groups=4))
        filtered, failed, *trained = [group_id for group_id, _, _ in starts]
        desk.done("gen", filtered, scores=(1.0, 1.0))
        desk.say("gen", m.GroupFailed(group_id=failed, reason="engine_error", retry=False))
        for group_id in trained:
            desk.done("gen", group_id)
        [batch] = desk.batch(step)
        # After step s there were s + 1 steps, whichever attempt made them.
        made = step + 1
        assert batch.ledger.model_dump() == {
            "admitted": 4 * made, "trained": 2 * made, "dropped_filtered": made, "failed": made,
            "dropped_stale": 0, "queued": 0, "in_flight": 0,
        }  # fmt: skip
        reasons = [line["reason"] for line in written(path)]
        assert reasons == ["zero_signal", "engine_error"] * made


def test_after_a_resume_the_books_and_the_file_still_tell_of_one_history(tmp_path):
    path = tmp_path / "drops.jsonl"
    changes = {"zero_signal": "drop", "depth": 4, "max_staleness": 8, "num_steps": 9}
    desk, log = desk_with_log(path, **changes)
    check_steps(desk, path, range(4))
    log.close()
    # Another broker, and a learner whose checkpoint is that of version 2; then of version 5.
    again = {"epoch": 1, "version": 2, "cursor": 8}
    desk, log = desk_with_log(path, learner=again, **changes)
    check_steps(desk, path, range(2, 6))
    desk.say("learner", m.Bye(reason="back soon"))
    desk.join("learner", "learner", epoch=2, version=5, cursor=20)
    assert desk.broker.status(0.0)["admitted"] == 4 * 5
    check_steps(desk, path, range(5, 7))
    log.close()
    # Credits are those of the ledger, which starts at version * groups_per_step.
    assert desk.counts.admitted == 2 * 5 + 4 * 2
