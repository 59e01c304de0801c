"""The broker's socket loop with real sockets: its address, its peers, its end."""

import json
import stat
import threading

import pytest

from asyncrl.broker.process import run, send_all
from asyncrl.broker.settings import Settings
from asyncrl.broker.state import Broker
from asyncrl.config import RunConfig
from asyncrl.errors import PeerLostError
from asyncrl.wire import messages as m
from asyncrl.wire.channel import Channel, Listener

RECEIVE_S = 20.0
"""Far more than any answer takes; reached only when the test fails."""


def make_config(**broker):
    return RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "task": {"kind": "repeat_letter"},
            "pipeline": {"groups_per_step": 1, "group_size": 2, "num_steps": 1, "max_staleness": 0},
            "broker": broker,
        }
    )


class Process:
    """`run` in a thread; what it raises is kept for `join`."""

    def __init__(self, config, folder, run_id="run-a"):
        self.error = None
        self.config = config
        self.run_id = run_id
        self.address_file = folder / "deep" / "broker.json"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.address = self._read_address()

    def _run(self):
        try:
            run(self.config, run_id=self.run_id, token="secret", address_file=self.address_file)
        except PeerLostError as error:
            self.error = error

    def _read_address(self):
        tries = threading.Event()
        for _ in range(2000):
            if self.address_file.exists():
                return json.loads(self.address_file.read_text())
            tries.wait(0.01)
        raise AssertionError("no address file")

    def join(self):
        self._thread.join(RECEIVE_S)
        assert not self._thread.is_alive()
        return self.error

    def connect(self):
        return Channel(self.address["endpoint"])

    def hello(self, role, **fields):
        known = {"run_id": self.run_id, "config_digest": self.config.digest, "token": "secret"}
        return m.Hello(role=role, name=role, **(known | fields))


def answer(channel, message, frames=()):
    channel.send(message, frames)
    return receive(channel)


def receive(channel):
    envelope = channel.receive(RECEIVE_S)
    assert envelope is not None
    return envelope.message


def test_a_whole_run_over_sockets_ends_well(tmp_path):
    broker = Process(make_config(), tmp_path)
    assert stat.S_IMODE(broker.address_file.stat().st_mode) == 0o600
    assert broker.address["run_id"] == "run-a"
    assert [path.name for path in broker.address_file.parent.iterdir()] == ["broker.json"]
    learner, gen = broker.connect(), broker.connect()
    assert answer(learner, broker.hello("learner")).kind == "welcome"
    assert answer(gen, broker.hello("generator")).kind == "welcome"
    assert answer(gen, m.WantWork(epoch=0, version=0, num_groups=4)).kind == "evaluate"
    work = receive(gen)
    assert [start.ordinal for start in work.starts] == [0]
    done = m.GroupDone(group_id=0, scores=[0.0, 1.0], num_tokens=2, oldest_version=0)
    gen.send(done, [b"header", b"tokens"])
    learner.send(m.WantBatch(step=0))
    batch = learner.receive(RECEIVE_S)
    assert [bytes(frame) for frame in batch.frames] == [b"header", b"tokens"]
    learner.send(m.Bye(reason="done"))
    assert receive(gen) == m.Stop(reason="all 1 steps are trained")
    gen.send(m.Bye(reason="stopped"))
    assert broker.join() is None
    learner.close()
    gen.close()


def test_rubbish_costs_only_its_sender(tmp_path):
    broker = Process(make_config(), tmp_path)
    learner, gen, ghost = broker.connect(), broker.connect(), broker.connect()
    assert answer(learner, broker.hello("learner")).kind == "welcome"
    assert answer(gen, broker.hello("generator")).kind == "welcome"
    ghost.send_encoded([b"\xff not a message"])
    assert receive(ghost).kind == "refuse"
    gen.send_encoded([b"\xff not a message"])
    assert receive(gen).kind == "stop"
    assert answer(gen, m.Beat()).kind == "refuse"
    assert answer(learner, m.Beat()).kind == "beat"
    learner.send(m.Bye(reason="crash", failed=True))
    assert "crash" in str(broker.join())
    for channel in (learner, gen, ghost):
        channel.close()


def test_a_peer_of_another_run_is_refused_and_both_runs_live(tmp_path):
    config = make_config()
    one, two = (Process(config, tmp_path / name, run_id=name) for name in ("run-a", "run-b"))
    assert one.address["endpoint"] != two.address["endpoint"]
    lost = one.connect()
    refusal = answer(lost, two.hello("generator"))
    assert refusal.kind == "refuse"
    assert "'run-a'" in refusal.reason
    assert "'run-b'" in refusal.reason
    for process in (one, two):
        learner = process.connect()
        assert answer(learner, process.hello("learner")).kind == "welcome"
        learner.send(m.Bye(reason="end", failed=True))
        assert process.join() is not None
        learner.close()
    lost.close()


def test_a_silent_learner_ends_the_run_with_a_named_error(tmp_path):
    broker = Process(make_config(beat_s=0.05, max_missed_beats=4), tmp_path)
    learner = broker.connect()
    answer(learner, broker.hello("learner"))
    error = broker.join()
    assert isinstance(error, PeerLostError)
    assert "silent" in str(error)
    learner.close()


@pytest.mark.parametrize("message", [m.Beat(), m.WantBatch(step=0)])
def test_the_wrong_token_opens_nothing(tmp_path, message):
    broker = Process(make_config(), tmp_path)
    thief, learner = broker.connect(), broker.connect()
    assert answer(thief, broker.hello("learner", token="guess")).kind == "refuse"
    assert answer(thief, message).kind == "refuse"
    assert answer(learner, broker.hello("learner")).kind == "welcome"
    learner.send(m.Bye(reason="end", failed=True))
    assert broker.join() is not None
    thief.close()
    learner.close()


def test_a_peer_that_cannot_be_reached_is_lost_at_once_and_its_work_moves_on():
    config = make_config()
    broker = Broker(Settings.from_config(config, run_id="run-a", token="secret"))
    known = {"run_id": "run-a", "config_digest": config.digest, "token": "secret"}
    for name in ("learner", "gen", "gen2"):
        role = "learner" if name == "learner" else "generator"
        broker.handle(name.encode(), m.Hello(role=role, name=name, **known), [], 0.0)
    listener = Listener("tcp://127.0.0.1:*", max_message_bytes=2**20)
    # Nobody is connected: each generator in turn gets the one group and is found to be gone.
    for name in ("gen", "gen2"):
        out = broker.handle(name.encode(), m.WantWork(epoch=0, version=0, num_groups=1), [], 1.0)
        send_all(broker, listener, out, 1.0)
    assert broker.peers.generators == []
    counts = broker.epoch.groups.ledger.counts()
    assert (counts.admitted, counts.failed, counts.in_flight) == (2, 2, 0)
    assert broker.over is None  # nothing was sent to the learner, so it is not known to be gone
    listener.close()
