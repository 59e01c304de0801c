"""The ledger against a slow restatement, and its bound under random schedules."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.broker.admission import Admission
from asyncrl.errors import StaleRolloutError


def assert_balances(ledger: Admission) -> None:
    counts = ledger.counts()
    dropped = counts.dropped_stale + counts.dropped_filtered + counts.failed
    assert counts.admitted == counts.trained + dropped + counts.queued + counts.in_flight
    assert ledger.charged == counts.admitted - dropped


@settings(max_examples=150, deadline=None)
@given(
    groups_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    num_generators=st.integers(1, 4),
    first_version=st.integers(0, 7),
    seed=st.integers(0, 2**32),
)
def test_every_group_is_trained_within_k_versions_and_nothing_stalls(
    groups_per_step, max_staleness, num_generators, first_version, seed
):
    """Generators adopt late and unevenly, groups finish in any order, some are dropped."""
    rng = random.Random(seed)
    ledger = Admission(
        groups_per_step=groups_per_step, max_staleness=max_staleness, version=first_version
    )
    held = [first_version] * num_generators
    started_at: dict[int, int] = {}
    running: list[int] = []
    survivors: list[int] = []  # the reference: open groups in order of admission
    num_charged = first_version * groups_per_step  # the reference: admitted - dropped, literally
    next_id = 0
    last_step = first_version + 15
    for _ in range(5000):
        if ledger.version == last_step:
            break
        event = rng.choice(["start", "start", "finish", "finish", "drop", "adopt", "take"])
        if event == "start":
            version = rng.choice(held)
            limit = (version + max_staleness + 1) * groups_per_step
            assert ledger.credits(version) == max(0, limit - num_charged)
            if num_charged < limit:
                ledger.admit(next_id, version)
                started_at[next_id] = version
                running.append(next_id)
                survivors.append(next_id)
                num_charged += 1
                next_id += 1
        elif event == "finish" and running:
            ledger.finish(running.pop(rng.randrange(len(running))))
        elif event == "drop" and running and rng.random() < 0.4:
            group_id = running.pop(rng.randrange(len(running)))
            ledger.drop(group_id, rng.choice(["stale", "filtered", "failed"]))
            survivors.remove(group_id)
            num_charged -= 1
        elif event == "adopt":
            index = rng.randrange(num_generators)
            held[index] = rng.randint(held[index], ledger.version)
        elif event == "take":
            step = ledger.version
            first = survivors[:groups_per_step]
            is_ready = len(first) == groups_per_step and not set(first) & set(running)
            assert ledger.take() == (first if is_ready else None)
            if is_ready:
                del survivors[:groups_per_step]
                assert all(0 <= step - started_at[g] <= max_staleness for g in first)
        assert ledger.missing() == [g for g in survivors[:groups_per_step] if g in running]
        assert_balances(ledger)
    assert ledger.version == last_step


def test_one_pass_through_the_books_counts_every_group_once():
    # G = 2, k = 1, from version 0: (0 + 1 + 1) * 2 = 4 credits.
    ledger = Admission(groups_per_step=2, max_staleness=1)
    assert ledger.credits(0) == 4
    for group_id in range(4):
        ledger.admit(group_id, 0)
    assert ledger.credits(0) == 0
    ledger.finish(0)
    ledger.drop(1, "failed")  # credit back: 3 survivors charged
    assert ledger.credits(0) == 1
    ledger.finish(3)
    assert ledger.take() is None  # group 2 is second in line and runs; 3 may not overtake it
    assert ledger.missing() == [2]
    ledger.finish(2)
    assert ledger.take() == [0, 2]
    assert ledger.version == 1
    assert ledger.credits(0) == 1  # 4 - (2 trained + 1 open)
    assert ledger.credits(1) == 3  # 6 - 3
    assert ledger.counts().model_dump() == {
        "admitted": 4,
        "trained": 2,
        "dropped_stale": 0,
        "dropped_filtered": 0,
        "failed": 1,
        "queued": 1,
        "in_flight": 0,
    }


def test_a_resume_is_charged_for_the_steps_before_it():
    # Version 5 with G = 3: 15 survivors lie behind; k = 2 allows (5 + 3) * 3 - 15 = 9 more.
    ledger = Admission(groups_per_step=3, max_staleness=2, version=5)
    assert ledger.credits(5) == 9
    assert ledger.credits(2) == 0  # (2 + 3) * 3 = 15
    assert ledger.counts().admitted == ledger.counts().trained == 15
    assert_balances(ledger)


def test_at_k_0_a_version_starts_exactly_the_groups_of_its_own_step():
    ledger = Admission(groups_per_step=2, max_staleness=0)
    for step in range(3):
        assert ledger.credits(step) == 2
        for group_id in (2 * step, 2 * step + 1):
            ledger.admit(group_id, step)
            ledger.finish(group_id)
        assert ledger.credits(step) == 0
        assert ledger.take() == [2 * step, 2 * step + 1]
        assert ledger.credits(step) == 0  # the old version gets nothing of the next step


def test_a_version_that_does_not_exist_yet_has_no_credit():
    ledger = Admission(groups_per_step=2, max_staleness=3)
    assert ledger.credits(1) == 0
    with pytest.raises(StaleRolloutError, match="no credit at version 1"):
        ledger.admit(0, 1)


def test_admission_without_credit_raises_and_changes_nothing():
    ledger = Admission(groups_per_step=1, max_staleness=0)
    ledger.admit(0, 0)
    with pytest.raises(StaleRolloutError, match="max_staleness=0"):
        ledger.admit(1, 0)
    assert ledger.counts().admitted == 1


def test_a_group_is_neither_admitted_nor_finished_nor_dropped_twice():
    ledger = Admission(groups_per_step=4, max_staleness=0)
    ledger.admit(7, 0)
    with pytest.raises(ValueError, match="admitted already"):
        ledger.admit(7, 0)
    ledger.finish(7)
    with pytest.raises(ValueError, match="finished already"):
        ledger.finish(7)
    ledger.drop(7, "stale")
    with pytest.raises(KeyError):
        ledger.drop(7, "stale")
    with pytest.raises(KeyError):
        ledger.finish(7)
    assert_balances(ledger)
    assert ledger.credits(0) == 4


@pytest.mark.parametrize(
    ("groups_per_step", "max_staleness", "version"), [(0, 0, 0), (1, -1, 0), (1, 0, -1)]
)
def test_absurd_settings_are_refused(groups_per_step, max_staleness, version):
    with pytest.raises(ValueError, match=">="):
        Admission(groups_per_step=groups_per_step, max_staleness=max_staleness, version=version)
