"""The broker's books kept a second time, from the transitions that it reports to its journal."""


class Books:
    """A journal that keeps books of its own from the transitions alone."""

    def opened(self, *, epoch, version, cursor):
        self.open, self.queued, self.steps = set(), set(), version
        return {}

    def admitted(self, start, version):
        assert start.group_id not in self.open
        self.open.add(start.group_id)

    def finished(self, group_id, frames):
        assert group_id in self.open
        self.queued.add(group_id)

    def dropped(self, drop):
        assert drop.start.group_id not in self.queued
        assert drop.version == self.steps
        self.open.remove(drop.start.group_id)

    def trained(self, step, group_ids):
        assert step == self.steps
        assert self.queued >= set(group_ids)
        self.steps += 1
        self.open -= set(group_ids)
        self.queued -= set(group_ids)

    def check(self, broker, config):
        """The ledger balances, agrees with these books and keeps to its bounds."""
        if broker.epoch is None:
            return
        counts = broker.epoch.groups.ledger.counts()
        dropped = counts.dropped_stale + counts.dropped_filtered + counts.failed
        assert counts.admitted == counts.trained + dropped + counts.queued + counts.in_flight
        assert counts.queued == len(self.queued)
        assert counts.queued + counts.in_flight == len(self.open)
        assert counts.trained == self.steps * config.groups_per_step
        assert counts.admitted - dropped <= config.num_steps * config.groups_per_step
        assert counts.queued + counts.in_flight <= config.depth * config.groups_per_step
