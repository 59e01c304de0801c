"""The background line to the broker: beats, control messages, named ends."""

import queue
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from asyncrl.errors import ConfigError, PeerLostError, ProtocolError, RefusedError
from asyncrl.wire.mailbox import Mailbox
from asyncrl.wire.messages import Bye, Evaluate, GroupDone, Hello, Refuse, Stop, Welcome
from tests.unit.peers import PATIENCE_S, brokered, done

HELLO = Hello(role="generator", name="g0", run_id="r", config_digest="d", version=3)
CALM = Welcome(beat_s=1000.0, silence_s=2000.0)
"""No timer fires within a test: whatever happens was caused by a message or a call."""

LIVELY = Welcome(beat_s=0.01, silence_s=1000.0)


@contextmanager
def mailed(welcome, *, mute=False):
    with brokered(welcome, mute=mute) as broker:
        mailbox = Mailbox(broker.endpoint, HELLO, connect_timeout_s=PATIENCE_S)
        try:
            assert broker.get().message == HELLO
            yield broker, mailbox
        finally:
            mailbox.close("end of test")


def mailbox_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "mailbox"]


def test_one_hello_is_answered_by_the_welcome():
    with mailed(CALM) as (broker, mailbox):
        assert mailbox.welcome == CALM
        mailbox.send(done(1))
        assert broker.get().message == done(1)  # and not a second Hello


def test_a_refusal_raises_its_reason_and_leaves_no_thread():
    with (
        brokered(Refuse(reason="config digest d, expected e")) as broker,
        pytest.raises(RefusedError, match="config digest d, expected e"),
    ):
        Mailbox(broker.endpoint, HELLO, connect_timeout_s=PATIENCE_S)
    assert mailbox_threads() == []


def test_another_answer_than_welcome_is_an_error_that_names_it():
    with (
        brokered(Stop(reason="over")) as broker,
        pytest.raises(ProtocolError, match=r"got stop .*expected welcome"),
    ):
        Mailbox(broker.endpoint, HELLO, connect_timeout_s=PATIENCE_S)


def test_no_answer_is_a_lost_peer_that_names_endpoint_and_seconds():
    with (
        brokered(None) as broker,
        pytest.raises(PeerLostError, match=rf"{broker.endpoint} .* within 0\.05 s"),
    ):
        Mailbox(broker.endpoint, HELLO, connect_timeout_s=0.05)
    assert mailbox_threads() == []


def test_an_endpoint_that_is_none_is_an_error_of_the_caller():
    with pytest.raises(ConfigError, match="smoke://x"):
        Mailbox("smoke://x", HELLO, connect_timeout_s=PATIENCE_S)


def test_beats_leave_and_control_messages_arrive_while_the_caller_computes():
    with mailed(LIVELY) as (broker, mailbox):
        broker.send(Evaluate(version=3))
        total = 0
        while not broker.beaten.is_set():  # 20 beats without one call of the mailbox
            total += sum(range(1000))
        assert total > 0
        assert mailbox.receive(PATIENCE_S).message == Evaluate(version=3)
        assert mailbox.receive(0.0) is None  # the answers to the beats stay inside


def test_a_broker_that_answers_beats_is_not_lost():
    # 0.06 s between beats, so that the 20th comes after silence_s = 1 s.
    with mailed(Welcome(beat_s=0.06, silence_s=1.0)) as (broker, mailbox):
        assert broker.beaten.wait(PATIENCE_S)
        assert mailbox.receive(0.0) is None


def test_a_silent_broker_is_lost_after_what_it_said_before_was_delivered():
    with mailed(Welcome(beat_s=0.02, silence_s=0.3), mute=True) as (broker, mailbox):
        broker.send(Evaluate(version=1))
        broker.send(Evaluate(version=2))
        assert mailbox.receive(PATIENCE_S).message == Evaluate(version=1)
        mailbox._thread.join(PATIENCE_S)

        assert mailbox.receive(0.0).message == Evaluate(version=2)
        for call in (lambda: mailbox.receive(PATIENCE_S), lambda: mailbox.send(done(1))):
            with pytest.raises(PeerLostError, match=rf"{broker.endpoint} was silent for 0\.\d s"):
                call()


def test_a_waiting_caller_learns_at_once_that_the_broker_is_lost():
    with (
        mailed(Welcome(beat_s=0.02, silence_s=0.1), mute=True) as (_, mailbox),
        pytest.raises(PeerLostError, match="was silent"),
    ):
        mailbox.receive(10 * PATIENCE_S)


def test_a_listener_is_shown_each_message_once_in_order_before_it_is_received():
    shown = queue.SimpleQueue()
    with mailed(CALM) as (broker, mailbox):
        broker.send(Evaluate(version=0))
        broker.send(Evaluate(version=1))
        assert mailbox.receive(PATIENCE_S).message == Evaluate(version=0)
        with mailbox._changed:
            mailbox._changed.wait_for(lambda: mailbox._inbox, PATIENCE_S)
        mailbox.listen(shown.put)
        broker.send(Evaluate(version=2))
        for version in (1, 2):  # nobody receives meanwhile
            assert shown.get(timeout=PATIENCE_S) == Evaluate(version=version)
        for version in (1, 2):
            assert mailbox.receive(PATIENCE_S).message == Evaluate(version=version)
        assert shown.empty()


def test_no_message_can_be_received_or_missed_while_it_is_shown():
    # Under one lock with the inbox, or `listen` could come between the two and show it to nobody.
    is_locked = queue.SimpleQueue()

    def listener(message):
        def look():
            is_locked.put(not mailbox._changed.acquire(blocking=False))

        looking = threading.Thread(target=look)
        looking.start()
        looking.join(PATIENCE_S)

    with mailed(CALM) as (broker, mailbox):
        mailbox.listen(listener)
        broker.send(Evaluate(version=0))
        assert is_locked.get(timeout=PATIENCE_S)


def test_an_error_of_a_listener_is_raised_by_the_next_call():
    def refuse(message):
        raise ProtocolError(f"version {message.version} came twice")

    with mailed(CALM) as (broker, mailbox):
        mailbox.listen(refuse)
        broker.send(Evaluate(version=3))
        with pytest.raises(ProtocolError, match="version 3 came twice"):
            mailbox.receive(PATIENCE_S)


def test_a_refusal_in_mid_run_is_raised():
    with mailed(CALM) as (broker, mailbox):
        broker.send(Refuse(reason="who are you"))
        with pytest.raises(RefusedError, match="who are you"):
            mailbox.receive(PATIENCE_S)


def test_an_error_of_the_thread_is_raised_by_every_later_call():
    with mailed(CALM) as (broker, mailbox):
        broker.send([b"junk"])
        for call in (lambda: mailbox.receive(PATIENCE_S), lambda: mailbox.send(done(1))):
            with pytest.raises(ProtocolError, match=r"^header: got 4 bytes"):
                call()


def test_a_message_leaves_at_once_though_no_beat_is_due():
    with mailed(CALM) as (broker, mailbox):
        for number in range(50):
            mailbox.send(done(number))
            assert broker.get().message == done(number)


def test_many_threads_may_send_and_each_one_keeps_its_order():
    def send(first):
        for number in range(first, first + 100):
            mailbox.send(done(number))

    with mailed(CALM) as (broker, mailbox):
        threads = [threading.Thread(target=send, args=(1000 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        numbers = [broker.get().message.group_id for _ in range(800)]
        for thread in threads:
            thread.join(PATIENCE_S)

    for i in range(8):
        assert [n for n in numbers if n // 1000 == i] == list(range(1000 * i, 1000 * i + 100))


def test_a_frame_changed_after_send_was_sent_as_it_was():
    with mailed(CALM) as (broker, mailbox):
        frame = bytearray(200_000)
        for number in range(50):
            frame[:] = bytes([number]) * len(frame)
            mailbox.send(done(number), [frame])
        frame[:] = b"\xee" * len(frame)

        for number in range(50):
            assert bytes(broker.get().frames[0]) == bytes([number]) * len(frame)


def test_a_message_that_breaks_the_schema_is_the_sender_s_error_and_the_line_lives_on():
    with mailed(CALM) as (broker, mailbox):
        bad = GroupDone(group_id=1, scores=[float("nan")], num_tokens=0, oldest_version=0)
        with pytest.raises(ProtocolError, match=r"^scores\.0: got nan"):
            mailbox.send(bad)
        mailbox.send(done(2))
        assert broker.get().message == done(2)


def test_close_delivers_what_waits_then_a_bye_and_ends_the_thread():
    with mailed(CALM) as (broker, mailbox):
        for number in range(100):
            mailbox.send(done(number), [bytes(100_000)])
        mailbox.close("interrupted", failed=True)
        mailbox.close("again")

        assert mailbox_threads() == []
        assert [broker.get().message.group_id for _ in range(100)] == list(range(100))
        assert broker.get().message == Bye(reason="interrupted", failed=True)
        for call in (lambda: mailbox.receive(PATIENCE_S), lambda: mailbox.send(done(1))):
            with pytest.raises(PeerLostError, match="closed"):
                call()
    assert broker.came.empty()


def test_close_wakes_a_caller_that_waits():
    with mailed(CALM) as (_broker, mailbox):
        ended = queue.Queue()

        def wait():
            try:
                mailbox.receive(10 * PATIENCE_S)
            except PeerLostError as error:
                ended.put(str(error))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        mailbox.close("done")
        assert "closed" in ended.get(timeout=PATIENCE_S)


def test_close_does_not_wait_for_a_dead_broker():
    with brokered(CALM) as broker:
        mailbox = Mailbox(broker.endpoint, HELLO, connect_timeout_s=PATIENCE_S)
    mailbox.send(done(1), [bytes(10_000_000)])

    closing = threading.Thread(target=mailbox.close, args=("x",), daemon=True)
    closing.start()
    closing.join(PATIENCE_S)

    assert not closing.is_alive()
    assert mailbox_threads() == []


JOIN = """
import sys
from asyncrl.wire.mailbox import Mailbox
from asyncrl.wire.messages import Hello
hello = Hello(role="generator", name="g0", run_id="r", config_digest="d", version=3)
mailbox = Mailbox(sys.argv[1], hello, connect_timeout_s=20.0)
"""


def test_a_process_that_ends_without_closing_does_not_hang():
    with brokered(LIVELY) as broker:
        command = [sys.executable, "-c", JOIN + "raise SystemExit(3)", broker.endpoint]
        ended = subprocess.run(
            command, timeout=PATIENCE_S, capture_output=True, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (3, "")


def test_a_process_that_was_stopped_reads_before_it_judges_the_broker_silent():
    welcome = Welcome(beat_s=0.05, silence_s=0.5)
    command = [sys.executable, "-c", JOIN + "print(mailbox.receive(20.0).message.kind)"]
    with (
        brokered(welcome) as broker,
        subprocess.Popen([*command, broker.endpoint], stdout=subprocess.PIPE, text=True) as peer,
    ):
        assert isinstance(broker.get().message, Hello)
        peer.send_signal(signal.SIGSTOP)
        broker.send(Evaluate(version=1))
        time.sleep(2 * welcome.silence_s)  # Not for luck: the stop itself has to last.
        peer.send_signal(signal.SIGCONT)
        assert peer.communicate(timeout=PATIENCE_S)[0] == "evaluate\n"


def test_the_bell_rings_for_a_message_and_for_an_error_but_not_for_beats():
    with brokered(LIVELY) as broker:
        mailbox = Mailbox(broker.endpoint, HELLO, connect_timeout_s=PATIENCE_S)
        assert broker.get().message == HELLO
        assert broker.beaten.wait(PATIENCE_S)
        assert not select.select([mailbox.bell], [], [], 0)[0]
        broker.send(Evaluate(version=3))
        assert select.select([mailbox.bell], [], [], PATIENCE_S)[0]
        mailbox.bell.quiet()
        assert mailbox.receive(0.0).message == Evaluate(version=3)
        broker.send(Refuse(reason="enough"))
        assert select.select([mailbox.bell], [], [], PATIENCE_S)[0]
        with pytest.raises(ProtocolError, match="enough"):
            mailbox.receive(0.0)
        mailbox.close("end of test")
