"""What a scoring pool says about the time of its processes, and how its caller sleeps and wakes."""

import os
import select
import threading
import time

import pytest

from asyncrl.wire.bell import Bell
from tests.unit.scorer_files import PATIENCE_S, PROBLEM, collect, pool_of, scorer_task, until

pytestmark = pytest.mark.process


def union_s(intervals):
    """Length of what the intervals cover, counted once."""
    total_s, reached_s = 0.0, 0.0
    for start_s, end_s in sorted(intervals):
        total_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s


def test_every_item_is_one_interval_of_its_worker_and_none_overlap(tmp_path):
    # 40 items of nearly no time, and two naps of 0.5 s: one second at least.
    seen = []
    task = scorer_task(tmp_path)
    start_s = time.monotonic()
    with pool_of(task, num_workers=2, on_busy=lambda *facts: seen.append(facts)) as pool:
        for key in range(40):
            pool.submit(key, PROBLEM, "length abc")
        for key in (40, 41):
            pool.submit(key, PROBLEM, f"nap {tmp_path}/nap")
        collect(pool)
        usage = pool.usage()
        end_s = time.monotonic()
    assert len(seen) == 42
    assert {index for index, _, _ in seen} <= {0, 1}
    for worker in (0, 1):
        mine = [(begun_s, done_s) for index, begun_s, done_s in seen if index == worker]
        assert all(start_s <= begun_s <= done_s <= end_s for begun_s, done_s in mine)
        assert union_s(mine) == pytest.approx(sum(done - begun for begun, done in mine))
    spent_s = sum(done_s - begun_s for _, begun_s, done_s in seen)
    assert spent_s >= 1.0
    assert usage["scorer/score"] == pytest.approx(spent_s)
    assert 0.0 < sum(usage.values()) <= 2 * (end_s - start_s)


def test_an_item_that_is_being_scored_counts_before_its_verdict_and_so_does_a_killed_one(tmp_path):
    seen = []
    with pool_of(scorer_task(tmp_path), deadline_s=0.5, on_busy=lambda *f: seen.append(f)) as pool:
        pool.submit(0, PROBLEM, "hang")
        until(lambda: pool.usage()["scorer/score"] > 0.1, step=pool.poll)
        assert seen == []
        until(lambda: pool.poll() != [])
        ((index, begun_s, done_s),) = seen
        assert index == 0
        assert done_s - begun_s > 0.5
        assert pool.usage()["scorer/score"] == pytest.approx(done_s - begun_s)


def test_a_forged_time_of_a_verdict_makes_no_time(tmp_path):
    # "lie" says verdict 3 was done at second 0 of the clock, without having it; 3 is next.
    seen = []
    with pool_of(scorer_task(tmp_path), deadline_s=0.5, on_busy=lambda *f: seen.append(f)) as pool:
        pool.submit(3, PROBLEM, "lie")
        collect(pool)
    assert all(done_s >= begun_s for _, begun_s, done_s in seen)
    assert seen


def test_a_rest_ends_with_a_verdict_with_the_bell_and_else_after_a_nap(tmp_path):
    bell = Bell()
    with pool_of(scorer_task(tmp_path)) as pool:
        pool.submit(0, PROBLEM, "length abc")
        until(lambda: pool.poll() != [], step=lambda: pool.rest(PATIENCE_S, also=[bell.fileno()]))
        # Nothing is pending: only the bell can end a rest before its nap is over.
        bell.ring()
        pool.rest(PATIENCE_S, also=[bell.fileno()])
        assert select.select([bell.fileno()], [], [], 0)[0]
        bell.quiet()
        begun_s = time.monotonic()
        pool.rest(PATIENCE_S, also=[bell.fileno()])
        assert time.monotonic() - begun_s < PATIENCE_S  # MAX_NAP_S, for the deadlines' sake
        assert not select.select([bell.fileno()], [], [], 0)[0]
    bell.close()


def test_a_bell_is_heard_however_often_and_early_it_was_rung_and_is_quiet_after():
    bell = Bell()
    ringer = threading.Thread(target=lambda: [bell.ring() for _ in range(100_000)])
    ringer.start()
    ringer.join(PATIENCE_S)
    assert not ringer.is_alive()  # a full bell does not block who rings it
    assert select.select([bell.fileno()], [], [], PATIENCE_S)[0]
    bell.quiet()
    assert not select.select([bell.fileno()], [], [], 0)[0]
    bell.ring()
    assert select.select([bell.fileno()], [], [], PATIENCE_S)[0]
    descriptor = bell.fileno()
    bell.close()
    bell.ring()  # nobody hears it, and no other file that got the number is written to
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
