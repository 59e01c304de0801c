"""What the live view knows of a run: grown from its files as they grow, none read twice."""

from pathlib import Path

from asyncrl.report.files import read_config, read_restarts, read_split, read_tail, setting
from asyncrl.report.shapes import DROP, EVAL, ROLLOUT, STEP, fit
from asyncrl.report.verdict import Verdict, read_verdict
from asyncrl.telemetry.bottleneck import Split
from asyncrl.telemetry.console import Follower
from asyncrl.telemetry.jsonlines import Record, integer

_NUM_ALERTS = 4
_NUM_ROLLOUTS = 6
_NUM_DROPS = 2
_NUM_RESTARTS = 2


class RunState:
    """The newest records of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        """Read what there is."""
        self._run_dir = run_dir
        self._steps = Follower(run_dir / "metrics.jsonl")
        self._evals = Follower(run_dir / "evals.jsonl")
        self.config: Record = {}
        self.split: Split | None = None
        self.verdict: Verdict
        self.last: Record = {}
        """The newest step's record; {} before the first."""

        self.rewards: dict[int, float] = {}
        """By step, in the order of the surviving history."""

        self.seconds: dict[int, float] = {}
        self.evals: dict[int, float] = {}
        """Held-out score by version."""

        self.alerts: list[tuple[int, str]] = []
        """The newest few that began: step, text."""

        self.restarts: list[str] = []
        """The newest few processes that were started again, with the cause."""

        self.rollouts: list[Record] = []
        self.drops: list[Record] = []
        self.read()

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run, if its configuration says so."""
        return integer(setting(self.config, "pipeline.num_steps"))

    def read(self) -> None:
        """Take what is new."""
        if not self.config:
            self.config, _ = read_config(self._run_dir)
        if self.split is None:
            self.split = read_split(self._run_dir)
        self.verdict = read_verdict(self._run_dir)
        self.restarts = read_restarts(self._run_dir)[-_NUM_RESTARTS:]
        for record in self._steps.new():
            self._take(fit(record, STEP))
        for record in self._evals.new():
            found = fit(record, EVAL)
            if "version" in found and found.get("mean_score") is not None:
                self.evals[found["version"]] = found["mean_score"]
        group_size = integer(setting(self.config, "pipeline.group_size")) or 1
        tail = read_tail(self._run_dir / "rollouts.jsonl", _NUM_ROLLOUTS * group_size)
        rows = (fit(row, ROLLOUT) for row in tail)
        groups = {(row.get("step"), row.get("group_id")): row for row in rows}
        self.rollouts = list(groups.values())[-_NUM_ROLLOUTS:]  # one of each group
        tail = read_tail(self._run_dir / "drops.jsonl", _NUM_DROPS)
        self.drops = [fit(drop, DROP) for drop in tail[-_NUM_DROPS:]]

    def _take(self, record: Record) -> None:
        if "step" not in record:
            return
        step: int = record["step"]
        for values in (self.rewards, self.seconds):
            for later in [known for known in reversed(values) if known >= step]:
                del values[later]  # a resumed run makes them again
        for values, name in ((self.rewards, "reward/mean"), (self.seconds, "time/step_s")):
            if name in record:
                values[step] = record[name]
        texts = [(step, text) for text in record.get("new_alerts", ())]
        self.alerts = [(at, text) for at, text in self.alerts if at < step] + texts
        self.alerts = self.alerts[-_NUM_ALERTS:]
        self.last = record
