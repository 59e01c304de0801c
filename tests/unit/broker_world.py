"""Simulated peers for the broker: generators that dawdle, die and lie silent, a learner that moves.

The peers keep their own facts (what they held when they really started a group, what they sent), so
that nothing asserted here is read off the broker's own state.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from asyncrl.broker.settings import Settings
from asyncrl.broker.state import Broker
from asyncrl.wire import messages as m
from tests.unit.broker_books import Books

MAX_EVENTS = 20_000


@dataclass
class Gen:
    name: str
    held: tuple[int, int] = (0, 0)
    offered: m.Announcement | None = None
    asked: tuple[int, int] | None = None
    running: dict[int, tuple[int, int]] = field(default_factory=dict)  # id -> held at its start
    evaluating: int | None = None
    inbox: deque = field(default_factory=deque)
    is_silent: bool = False
    is_gone: bool = False

    @property
    def sender(self):
        return self.name.encode()


class World:
    """One run: generators that dawdle, die and lie silent, a learner that may come back."""

    def __init__(self, config: Settings, seed: int, *, num_deaths: int, num_restarts: int) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.books = Books()
        self.broker = Broker(config, journal=self.books)
        self.now_s = 0.0
        self.gens: list[Gen] = []
        self.num_joined = 0
        self.num_deaths = num_deaths
        self.num_restarts = num_restarts
        self.started: dict[int, tuple[int, int, str]] = {}  # id -> (epoch, version, holder)
        self.bound = config.max_staleness  # as the learner set it last
        self.promised: dict[int, int] = {}  # id -> the bound when the broker gave it out
        self.ordinals: dict[int, int] = {}
        self.attempts: dict[int, int] = {}
        self.history: list[m.Batch] = []  # of the surviving history: one a step
        self.batches_of_epoch: list[m.Batch] = []
        self.evaluated: list[int] = []  # versions, as the learner of this epoch hears of them
        self.is_done = False
        self.epoch = -1
        self.learner_inbox: deque = deque()
        self.learner_name = b""
        self.learner_is_busy = False
        self.next_ask_is_due = False

    # -- the wire

    def deliver(self, out):
        for receiver, message, frames in out:
            if receiver == self.learner_name:
                self.learner_inbox.append((message, list(frames)))
                continue
            if isinstance(message, m.Work):
                self.promised |= {start.group_id: self.bound for start in message.starts}
            gen = next(g for g in self.gens if g.sender == receiver)
            if not gen.is_gone and not isinstance(message, m.Beat):
                gen.inbox.append(message)
        self.books.check(self.broker, self.config)

    def say(self, sender, message, frames=()):
        self.deliver(self.broker.handle(sender, message, list(frames), self.now_s))

    def hello(self, role, name, **kwargs):
        return m.Hello(role=role, name=name, run_id="run", config_digest="d", token="t", **kwargs)

    # -- generators

    def join(self):
        gen = Gen(f"gen{self.num_joined}")
        self.num_joined += 1
        self.gens.append(gen)
        self.say(gen.sender, self.hello("generator", gen.name))

    def generator_turn(self, gen: Gen):
        if gen.inbox and self.rng.random() < 0.7:
            self.generator_hears(gen, gen.inbox.popleft())
        if gen.is_gone:
            return
        if gen.offered is not None and gen.evaluating is None and self.rng.random() < 0.4:
            gen.held, gen.offered = (gen.offered.epoch, gen.offered.version), None
        if gen.evaluating is not None and self.rng.random() < 0.2:
            assert gen.held[1] == gen.evaluating  # nothing was adopted meanwhile
            done = m.EvalDone(
                version=gen.evaluating,
                mean_score=0.5,
                num_samples=1,
                num_unscored=0,
                mean_tokens=1.0,
                seconds=1.0,
            )
            gen.evaluating = None
            self.say(gen.sender, done)
        if gen.running and self.rng.random() < 0.5:
            self.finish_a_group(gen)
        if gen.asked != gen.held and len(gen.running) < 6:
            gen.asked = gen.held
            num_groups = 6 - len(gen.running)
            self.say(
                gen.sender,
                m.WantWork(epoch=gen.held[0], version=gen.held[1], num_groups=num_groups),
            )

    def generator_hears(self, gen: Gen, message):
        match message:
            case m.Work(starts=starts):
                gen.asked = None
                for start in starts:
                    assert start.group_id not in self.ordinals
                    self.ordinals[start.group_id] = start.ordinal
                    self.attempts[start.group_id] = start.attempt
                    self.started[start.group_id] = (*gen.held, gen.name)
                    gen.running[start.group_id] = gen.held
            case m.Announcement():
                gen.asked = None
                assert (message.epoch, message.version) > gen.held
                gen.offered = message
            case m.Evaluate(version=version):
                assert version == gen.held[1]
                assert gen.evaluating is None
                gen.evaluating = version
            case m.Welcome(announcement=announcement):
                gen.offered = announcement
            case m.Refuse():
                gen.is_gone = True  # it was lost in the meantime: nobody listens to it any more
            case m.Stop():
                raise AssertionError(f"a generator was stopped: {message.reason}")

    def finish_a_group(self, gen: Gen):
        group_id = self.rng.choice(list(gen.running))
        held_at_start = gen.running.pop(group_id)
        luck = self.rng.random()
        if luck < 0.06:
            self.say(
                gen.sender, m.GroupFailed(group_id=group_id, reason="aborted", retry=luck < 0.05)
            )
            return
        scores = [0.0, 1.0] if luck > 0.2 else [1.0, 1.0] if luck > 0.1 else [None, None]
        done = m.GroupDone(
            group_id=group_id, scores=scores, num_tokens=3, oldest_version=held_at_start[1]
        )
        self.say(gen.sender, done, [f"{gen.name}/{group_id}".encode(), b"tokens"])
        if self.rng.random() < 0.1:
            self.say(gen.sender, done, [b"again"])

    def kill(self, gen: Gen):
        self.num_deaths -= 1
        way = self.rng.choice(["bye", "silent", "unreachable"])
        if way == "bye":
            gen.is_gone = True
            self.say(gen.sender, m.Bye(reason="moved"))
        elif way == "unreachable":
            gen.is_gone = True
            self.deliver(self.broker.unreachable(gen.sender, self.now_s))
        else:
            gen.is_silent = True  # and may wake up after it was lost
        self.join()

    # -- the learner

    def learner_joins(self):
        self.epoch += 1
        version = len(self.history)
        cursor = self.history[-1].cursor if self.history else 0
        self.learner_name = f"learner{self.epoch}".encode()
        self.learner_inbox.clear()
        self.batches_of_epoch = []
        self.evaluated = []
        self.learner_is_busy = False
        self.next_ask_is_due = True
        self.bound = self.config.max_staleness
        hello = self.hello(
            "learner",
            self.learner_name.decode(),
            epoch=self.epoch,
            version=version,
            cursor=cursor,
        )
        self.say(self.learner_name, hello)
        if self.epoch > 0:
            self.publish()  # the initial weights need not be published

    def publish(self):
        announcement = m.Announcement(
            epoch=self.epoch,
            version=len(self.history),
            transport="tcp",
            endpoint="e",
            manifest_digest="m",
        )
        self.say(self.learner_name, announcement)

    def move_the_bound(self):
        self.bound = self.rng.randint(0, self.config.max_staleness)
        self.say(self.learner_name, m.SetStaleness(max_staleness=self.bound))

    def learner_turn(self):
        if self.config.max_staleness and self.rng.random() < 0.1:
            self.move_the_bound()
        if self.learner_is_busy and self.rng.random() < 0.5:
            self.learner_is_busy = False
            self.publish()
            self.next_ask_is_due = True
            is_last = len(self.history) == self.config.num_steps
            if self.num_restarts and not is_last and self.rng.random() < 0.3:
                self.learner_restarts()
                return
        is_last = len(self.history) == self.config.num_steps
        if self.next_ask_is_due and self.rng.random() < 0.8:
            self.next_ask_is_due = False
            step = len(self.history)
            self.say(
                self.learner_name, m.WantEval(version=step) if is_last else m.WantBatch(step=step)
            )
        while self.learner_inbox:
            message, frames = self.learner_inbox.popleft()
            assert not isinstance(message, m.Stop | m.Refuse), message.reason
            if isinstance(message, m.Batch):
                self.train(message, frames)
            if isinstance(message, m.Batch | m.EvalResults):
                self.evaluated += [result.version for result in message.evals]
                self.is_done = isinstance(message, m.EvalResults)

    def learner_restarts(self):
        self.num_restarts -= 1
        self.say(self.learner_name, m.Bye(reason="moving"))
        del self.history[self.rng.randint(0, len(self.history)) :]  # back to a checkpoint
        self.learner_joins()

    def train(self, batch: m.Batch, frames: list[bytes]):
        step, k = len(self.history), self.config.max_staleness
        assert batch.step == step
        assert len(batch.groups) == self.config.groups_per_step
        promises = [self.promised[ref.group_id] for ref in batch.groups]
        assert batch.max_staleness == max(promises) <= k
        for ref in batch.groups:
            epoch, version, holder = self.started[ref.group_id]
            assert 0 <= step - version <= self.promised[ref.group_id]
            assert epoch == self.epoch or version == 0
            assert ref.generator == holder
            assert frames[: ref.num_frames] == [f"{holder}/{ref.group_id}".encode(), b"tokens"]
            del frames[: ref.num_frames]
        assert not frames
        self.history.append(batch)
        self.batches_of_epoch.append(batch)
        ids = [ref.group_id for b in self.batches_of_epoch for ref in b.groups]
        assert ids == sorted(set(ids))  # FIFO: ids rise with admission
        self.check_ordinals(ids, batch)
        self.learner_is_busy = True

    def check_ordinals(self, ids, batch: m.Batch):
        ordinals = [self.ordinals[i] for i in ids]
        assert len(ordinals) == len(set(ordinals))
        assert batch.cursor not in ordinals
        seen = 0
        for earlier in self.batches_of_epoch:  # what lies below a cursor is done for good
            seen += len(earlier.groups)
            assert all(ordinal >= earlier.cursor for ordinal in ordinals[seen:])

    # -- the schedule

    def tick(self):
        self.now_s += self.rng.choice([0.1, 0.5, 1.0])
        for gen in list(self.gens):
            if not gen.is_gone and not gen.is_silent:
                self.say(gen.sender, m.Beat())
            elif gen.is_silent and not gen.is_gone and self.rng.random() < 0.02:
                gen.is_silent = False
        self.say(self.learner_name, m.Beat())
        self.deliver(self.broker.tick(self.now_s))

    def run(self, num_generators: int):
        if self.rng.random() < 0.5:
            self.join()
            self.generator_turn(self.gens[0])  # asks before the learner is there
        self.learner_joins()
        while len(self.gens) < num_generators:
            self.join()
        for _ in range(MAX_EVENTS):
            alive = [g for g in self.gens if not g.is_gone and not g.is_silent]
            event = self.rng.random()
            if event < 0.7 and alive:
                self.generator_turn(self.rng.choice(alive))
            elif event < 0.9:
                self.learner_turn()
            elif event < 0.98 or not alive or not self.num_deaths:
                self.tick()
            else:
                self.kill(self.rng.choice(alive))
            if not alive:
                self.join()
            if self.is_done:
                return
        raise AssertionError(f"stalled: {self.broker.status(self.now_s)}")
