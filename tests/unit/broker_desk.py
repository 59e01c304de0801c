"""A broker at a desk: say something under a peer's name, look at what everybody received."""

from dataclasses import replace

from asyncrl.broker.settings import Settings
from asyncrl.broker.state import Broker
from asyncrl.wire import messages as m

SETTINGS = Settings(
    run_id="run-a",
    config_digest="cafe",
    token="secret",
    groups_per_step=2,
    max_staleness=1,
    group_size=2,
    num_steps=4,
    max_attempts=3,
    group_timeout_s=100.0,
    no_progress_s=50.0,
    silence_s=10.0,
)


class Desk:
    """A broker and what its peers have received, by name."""

    def __init__(self, **changes):
        self.broker = Broker(replace(SETTINGS, **changes))
        self.now_s = 0.0
        self.sent = {}

    def deliver(self, out):
        for receiver, message, frames in out:
            self.sent.setdefault(receiver.decode(), []).append((message, list(frames)))

    def say(self, name, message, frames=()):
        """Returns what `name` receives at once."""
        self.sent.clear()
        self.deliver(self.broker.handle(name.encode(), message, list(frames), self.now_s))
        return self.got(name)

    def tick(self, seconds, *alive):
        self.sent.clear()
        self.now_s += seconds
        for name in alive:
            self.deliver(self.broker.handle(name.encode(), m.Beat(), [], self.now_s))
        self.deliver(self.broker.tick(self.now_s))

    def got(self, name):
        return [message for message, _ in self.sent.get(name, []) if message.kind != "beat"]

    def join(self, name="gen", role="generator", **fields):
        known = {"run_id": "run-a", "config_digest": "cafe", "token": "secret"}
        return self.say(name, m.Hello(role=role, name=name, **(known | fields)))

    def want(self, name="gen", num_groups=8, epoch=0, version=0):
        return self.say(name, m.WantWork(epoch=epoch, version=version, num_groups=num_groups))

    def done(self, name, group_id, scores=(0.0, 1.0), frames=(b"x",), version=0):
        message = m.GroupDone(
            group_id=group_id, scores=list(scores), num_tokens=3, oldest_version=version
        )
        return self.say(name, message, frames)

    def announce(self, version, epoch=0, **fields):
        known = {"transport": "tcp", "endpoint": "e", "manifest_digest": "d"}
        message = m.Announcement(epoch=epoch, version=version, **(known | fields))
        return self.say("learner", message)

    def batch(self, step):
        return self.say("learner", m.WantBatch(step=step))

    @property
    def counts(self):
        counts = self.broker.epoch.groups.ledger.counts()
        dropped = counts.dropped_stale + counts.dropped_filtered + counts.failed
        assert counts.admitted == counts.trained + dropped + counts.queued + counts.in_flight
        return counts


def desk_at_work(**changes):
    """With a learner and the generator "gen", both at version 0."""
    desk = Desk(**changes)
    desk.join("learner", "learner")
    desk.join()
    return desk


def evaluated(desk, name="gen", version=0):
    return desk.say(
        name,
        m.EvalDone(
            version=version,
            mean_score=0.5,
            num_samples=4,
            num_unscored=0,
            mean_tokens=3.0,
            seconds=1.0,
        ),
    )


def kinds(messages):
    return [message.kind for message in messages]


def work(messages):
    """(group id, ordinal, attempt) of everything handed out."""
    return [
        (s.group_id, s.ordinal, s.attempt)
        for message in messages
        if message.kind == "work"
        for s in message.starts
    ]
