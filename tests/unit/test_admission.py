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


class Reference:
    """The rule restated over lists: what is admitted, in order, and what still runs."""

    def __init__(self, groups_per_step: int, max_staleness: int, version: int) -> None:
        self.size, self.k, self.version = groups_per_step, max_staleness, version
        self.bound = max_staleness
        self.num_charged = version * groups_per_step  # admitted - dropped, literally
        self.survivors: list[int] = []
        self.running: list[int] = []
        self.started_at: dict[int, int] = {}
        self.promised: dict[int, int] = {}  # the bound in force at the start

    def room(self, version: int) -> int:
        return max(0, (version + self.bound + 1) * self.size - self.num_charged)

    def start(self, group_id: int, version: int) -> None:
        self.num_charged += 1
        self.survivors.append(group_id)
        self.running.append(group_id)
        self.started_at[group_id] = version
        self.promised[group_id] = self.bound

    def drop(self, group_id: int) -> None:
        self.num_charged -= 1
        self.survivors.remove(group_id)

    def missing(self) -> list[int]:
        return [g for g in self.survivors[: self.size] if g in self.running]

    def take(self) -> list[int] | None:
        first = self.survivors[: self.size]
        if len(first) < self.size or self.missing():
            return None
        for g in first:
            assert 0 <= self.version - self.started_at[g] <= self.promised[g] <= self.k
        del self.survivors[: self.size]
        self.version += 1
        return first


@settings(max_examples=150, deadline=None)
@given(
    groups_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    num_generators=st.integers(1, 4),
    first_version=st.integers(0, 7),
    seed=st.integers(0, 2**32),
)
def test_every_group_is_trained_within_its_promised_bound_and_nothing_stalls(
    groups_per_step, max_staleness, num_generators, first_version, seed
):
    """Generators adopt late and unevenly, groups finish in any order, some are dropped, and the bound
    moves at any moment."""
    rng = random.Random(seed)
    ledger = Admission(
        groups_per_step=groups_per_step, max_staleness=max_staleness, version=first_version
    )
    slow = Reference(groups_per_step, max_staleness, first_version)
    held = [first_version] * num_generators
    for group_id in range(5000):
        event = rng.choice(["start", "start", "finish", "finish", "drop", "adopt", "take", "bound"])
        if event == "bound":
            slow.bound = rng.randint(0, max_staleness)
            ledger.set_bound(slow.bound)
            assert ledger.bound == slow.bound
        elif event == "start":
            version = rng.choice(held)
            assert ledger.credits(version) == slow.room(version)
            if slow.room(version):
                ledger.admit(group_id, version)
                slow.start(group_id, version)
        elif event == "adopt":
            index = rng.randrange(num_generators)
            held[index] = rng.randint(held[index], ledger.version)
        elif event == "take":
            assert ledger.take() == slow.take()
        elif slow.running and (event == "finish" or rng.random() < 0.4):
            chosen = slow.running.pop(rng.randrange(len(slow.running)))
            if event == "finish":
                ledger.finish(chosen)
            else:
                ledger.drop(chosen, rng.choice(["stale", "filtered", "failed"]))
                slow.drop(chosen)
        assert ledger.missing() == slow.missing()
        assert_balances(ledger)
        if ledger.version == first_version + 15:
            return
    raise AssertionError(f"stalled at version {ledger.version}")


def test_one_pass_through_the_books_counts_every_group_once():
    # F091.
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


def test_a_lowered_bound_takes_nothing_back_and_admits_again_once_the_charge_fits():
    # G = 2. Under k = 2: (0 + 2 + 1) * 2 = 6 groups; under k = 1: 4, under k = 0: 2.
    ledger = Admission(groups_per_step=2, max_staleness=2)
    for group_id in range(5):
        ledger.admit(group_id, 0)
    ledger.set_bound(1)
    assert ledger.credits(0) == 0
    assert ledger.num_open == 5
    ledger.set_bound(2)
    assert ledger.credits(0) == 1
    ledger.set_bound(0)
    for step in range(2):
        ledger.finish(2 * step)
        ledger.finish(2 * step + 1)
        assert ledger.take() == [2 * step, 2 * step + 1]
    # Version 2, one group open: 2 * 2 + 1 = 5 charged of (2 + 0 + 1) * 2 = 6.
    assert (ledger.credits(1), ledger.credits(2)) == (0, 1)


@pytest.mark.parametrize("bound", [-1, 3])
def test_the_bound_never_leaves_what_the_run_allows(bound):
    ledger = Admission(groups_per_step=1, max_staleness=2)
    with pytest.raises(ValueError, match=r"0\.\.2 \(pipeline.max_staleness\)"):
        ledger.set_bound(bound)
    assert ledger.bound == 2


def test_a_resume_is_charged_for_the_steps_before_it():
    # Version 5 with G = 3: 15 survivors lie behind; k = 2 allows (5 + 3) * 3 - 15 = 9 more.
    ledger = Admission(groups_per_step=3, max_staleness=2, version=5)
    assert ledger.credits(5) == 9
    assert ledger.credits(2) == 0  # (2 + 3) * 3 = 15
    assert ledger.counts().admitted == ledger.counts().trained == 15
    assert_balances(ledger)


def test_at_k_0_a_version_starts_exactly_the_groups_of_its_own_step():
    # F023.
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
    # F026.
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
