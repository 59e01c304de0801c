"""The whole broker under random schedules: the bound, the books, the order, and no stall."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.broker.settings import Settings
from asyncrl.wire.messages import Bye
from tests.unit.broker_world import World


@settings(max_examples=120, deadline=None)
@given(
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    depth=st.integers(1, 5),
    num_generators=st.integers(1, 4),
    num_steps=st.integers(1, 8),
    num_deaths=st.integers(0, 8),
    num_restarts=st.integers(0, 2),
    zero_signal=st.sampled_from(["keep", "drop"]),
    max_attempts=st.integers(1, 3),
    eval_every_steps=st.integers(0, 3),
    max_queue_bytes=st.sampled_from([0, 40, 2**31]),
    seed=st.integers(0, 2**32),
)
def test_any_schedule_trains_every_step_within_k_in_order_and_once(
    groups_per_step,
    max_staleness,
    depth,
    num_generators,
    num_steps,
    num_deaths,
    num_restarts,
    zero_signal,
    max_attempts,
    eval_every_steps,
    max_queue_bytes,
    seed,
):
    # F022, F026, F027, F091.
    config = Settings(
        run_id="run",
        config_digest="d",
        token="t",
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        depth=depth,
        group_size=2,
        num_steps=num_steps,
        max_attempts=max_attempts,
        group_timeout_s=8.0,
        zero_signal=zero_signal,
        no_progress_s=1e9,
        silence_s=3.0,
        eval_every_steps=eval_every_steps,
        max_queue_bytes=max_queue_bytes,
    )
    world = World(config, seed, num_deaths=num_deaths, num_restarts=num_restarts)
    world.run(num_generators)

    counts = world.broker.epoch.groups.ledger.counts()
    assert (counts.trained, counts.queued, counts.in_flight) == (num_steps * groups_per_step, 0, 0)
    assert max(world.attempts.values(), default=0) < max_attempts
    assert world.evaluated[-1] == num_steps
    assert world.evaluated[0] >= num_steps - len(world.batches_of_epoch)
    pairs = list(pairwise(world.evaluated))
    assert all(earlier < later for earlier, later in pairs)
    # Between the first and the last one each is for a multiple that was reached since the one before.
    every = eval_every_steps or num_steps
    assert all(earlier // every < later // every for earlier, later in pairs[:-1])
    world.say(world.learner_name, Bye(reason="done"))
    assert world.broker.over is not None
    assert not world.broker.over.failed
