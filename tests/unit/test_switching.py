"""The switch interval is short while a version is staged, and the process's own before and after."""

import queue
import sys
import threading

import pytest
import torch

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.staging import DeviceStaging
from asyncrl.weights.switching import INTERVAL_S, QuickSwitches
from tests.unit.weight_peers import TRANSPORTS, WAIT_S, generating, learning

BEFORE_S = 0.003


@pytest.fixture(autouse=True)
def _before():
    """An interval that is neither Python's default nor ours."""
    default_s = sys.getswitchinterval()
    sys.setswitchinterval(BEFORE_S)
    yield
    sys.setswitchinterval(default_s)


def interval() -> float:
    return pytest.approx(sys.getswitchinterval())


def test_it_is_restored_by_the_last_of_several_threads_to_leave():
    switches = QuickSwitches()
    steps = {name: threading.Semaphore(0) for name in ("first", "second")}
    done = queue.SimpleQueue()

    def visit(name):
        with switches:
            done.put(name)
            assert steps[name].acquire(timeout=WAIT_S)
        done.put(name)

    threads = {name: threading.Thread(target=visit, args=(name,)) for name in steps}
    for thread in threads.values():
        thread.start()
        done.get(timeout=WAIT_S)
        assert interval() == INTERVAL_S
    steps["first"].release()
    assert done.get(timeout=WAIT_S) == "first"
    assert interval() == INTERVAL_S
    steps["second"].release()
    assert done.get(timeout=WAIT_S) == "second"
    assert interval() == BEFORE_S
    for thread in threads.values():
        thread.join()


def fail_within(switches: QuickSwitches) -> None:
    with switches, switches:
        assert interval() == INTERVAL_S
        raise ValueError("inside")


def test_it_is_restored_after_an_error_and_can_be_shortened_again():
    switches = QuickSwitches()
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"):
            fail_within(switches)
        assert interval() == BEFORE_S


@pytest.mark.parametrize("microseconds", [1, 99, 123, 1001, 5003])
def test_it_is_never_made_longer_and_restored_to_the_microsecond(microseconds):
    sys.setswitchinterval((microseconds + 0.5) * 1e-6)
    for _ in range(10):
        with QuickSwitches():
            assert interval() == min(microseconds * 1e-6, INTERVAL_S)
        assert interval() == microseconds * 1e-6


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("is_staged", [True, False])
def test_it_is_short_while_a_version_is_staged_and_only_then(
    transport, is_staged, tmp_path, monkeypatch
):
    meanwhile, afterwards = [], queue.SimpleQueue()
    plain = torch.frombuffer

    def noting(*arguments, **more):  # what maps or copies a version's tensors needs it
        if threading.current_thread().name == "subscriber":
            meanwhile.append(sys.getswitchinterval())
        return plain(*arguments, **more)

    monkeypatch.setattr(torch, "frombuffer", noting)
    with (
        learning([("weight", torch.ones(1000))], tmp_path, transport) as learner,
        generating(
            tmp_path,
            staging=DeviceStaging(torch.device("cpu")) if is_staged else None,
            on_change=lambda: afterwards.put(sys.getswitchinterval()),
        ) as subscriber,
    ):
        announcement = learner.publish(0)
        subscriber.start(announcement.model_copy(update={"manifest_digest": "00" * 32}))
        assert afterwards.get(timeout=WAIT_S) == pytest.approx(BEFORE_S)
        with pytest.raises(WeightMismatchError):
            subscriber.ready()
        subscriber.start(announcement)
        assert afterwards.get(timeout=WAIT_S) == pytest.approx(BEFORE_S)
        subscriber.ready().release()
    assert meanwhile == pytest.approx([INTERVAL_S] * len(meanwhile))
    assert meanwhile
