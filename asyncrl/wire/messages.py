"""Every message, who sends it to whom, and what answers it: the protocol.

| peer says                       | answer                                                              |
|---------------------------------|---------------------------------------------------------------------|
| Hello(role, ...)                | broker: Welcome, or Refuse naming both values                       |
| WantWork(epoch, version, n)     | broker: Work once credits allow; Announcement if newer weights come |
|                                 | first (the open request is closed by either)                        |
| GroupDone + payload frames      | - (the group is queued)                                             |
| GroupFailed(group_id, reason)   | - (credit returned; the prompt is started again or given up)        |
| EvalDone(version, ...)          | - (handed to the learner with its next Batch or EvalResults)        |
| Counters(values)                | - (running totals of a generator, summed for the learner)           |
| WantBatch(step)                 | broker: Batch + payload frames, once step's groups are finished     |
| SetStaleness(max_staleness)     | - (from the learner: the bound for groups admitted from now on)     |
| Announcement(epoch, version..)  | - (from the learner: a version is published)                        |
| WantEval(version)               | broker: EvalResults once the evaluation of `version` is done        |
| Beat                            | broker: Beat (to a generator Announcement/Evaluate/Stop overtake)   |
| Bye(reason)                     | - (the peer leaves; its groups are started again elsewhere)         |
| WantManifest, WantChunk         | learner's publisher: Manifest, Chunk + frame, or Gone               |

Unasked messages from the broker are small control facts only (Announcement, Evaluate, Stop); every
payload is pulled. Large arrays travel as raw frames behind the header (codec.py). `PROTOCOL` rises
whenever a message changes; tests/golden pins the bytes.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from asyncrl.wire.message import Count as Count
from asyncrl.wire.message import WireMessage
from asyncrl.wire.weight_messages import Chunk as Chunk
from asyncrl.wire.weight_messages import Gone as Gone
from asyncrl.wire.weight_messages import Manifest as Manifest
from asyncrl.wire.weight_messages import WantChunk as WantChunk
from asyncrl.wire.weight_messages import WantManifest as WantManifest

PROTOCOL = 3

Role = Literal["generator", "learner"]


class Hello(WireMessage):
    """First message of a peer."""

    kind: Literal["hello"] = "hello"
    protocol: Count = PROTOCOL
    role: Role
    name: str
    run_id: str
    config_digest: str
    token: str = ""
    incarnation: Count = 0
    """Rises when a generator is started again under its name; the one before is dead then."""

    epoch: Count = 0
    """Learner: its epoch; rises with every restart."""

    version: Count = 0
    """Learner: the version it starts at (its checkpoint's). Generator: the version it holds."""

    cursor: Count = 0
    """Learner: ordinal of the first prompt that is not trained yet."""


class Announcement(WireMessage):
    """The learner offers a version; the broker passes it on."""

    kind: Literal["announcement"] = "announcement"
    epoch: Count
    version: Count
    transport: Literal["shm", "tcp"]
    endpoint: str
    """shm: path of the snapshot file; tcp: ZeroMQ address of the publisher."""

    manifest_digest: str
    final: bool = False
    """No further version will follow."""


class Welcome(WireMessage):
    """The broker accepts a peer."""

    kind: Literal["welcome"] = "welcome"
    beat_s: float
    silence_s: float
    announcement: Announcement | None = None
    """Newest published version, to be adopted before the first request for work."""


class Refuse(WireMessage):
    """The broker does not accept a peer; the reason names both values."""

    kind: Literal["refuse"] = "refuse"
    reason: str


class Beat(WireMessage):
    """Alive."""

    kind: Literal["beat"] = "beat"


class Bye(WireMessage):
    """A peer leaves on purpose."""

    kind: Literal["bye"] = "bye"
    reason: str
    failed: bool = False


class Stop(WireMessage):
    """The run is over for this peer."""

    kind: Literal["stop"] = "stop"
    reason: str
    failed: bool = False


class WantWork(WireMessage):
    """A generator holding (epoch, version) can start `num_groups` groups."""

    kind: Literal["want_work"] = "want_work"
    epoch: Count
    version: Count
    num_groups: Annotated[int, Field(ge=1, le=2**20)]


class GroupStart(WireMessage):
    """One admitted group."""

    group_id: Count
    ordinal: Count
    """Draw of the training stream that gives the prompt."""

    attempt: Count
    seed: Count
    """Derived from (run seed, group id, attempt)."""


class Work(WireMessage):
    """Groups to start now; each is charged in the ledger."""

    kind: Literal["work"] = "work"
    starts: list[GroupStart]


class GroupDone(WireMessage):
    """A finished, scored group; its payload frames follow and stay opaque to the broker."""

    kind: Literal["group_done"] = "group_done"
    group_id: Count
    scores: list[float | None]
    """One a rollout; None where the verdict is not a score."""

    num_tokens: Count
    oldest_version: Count


class GroupFailed(WireMessage):
    """A started group that will not finish."""

    kind: Literal["group_failed"] = "group_failed"
    group_id: Count
    reason: Literal["prompt_too_long", "all_unscored", "aborted", "bad_logprobs", "engine_error"]
    retry: bool
    """False: the prompt can never work and is given up at once."""


class Evaluate(WireMessage):
    """A generator shall sample the held-out prompts under the version it holds, `version`."""

    kind: Literal["evaluate"] = "evaluate"
    version: Count


class EvalDone(WireMessage):
    """The evaluation of one version, every sample under that version."""

    kind: Literal["eval_done"] = "eval_done"
    version: Count
    mean_score: float | None
    """Over the scored samples; None if there is none."""

    num_samples: Count
    num_unscored: Count
    mean_tokens: float
    seconds: float


class Counters(WireMessage):
    """Running totals of one generator since its start (seconds by span, tokens, verdicts)."""

    kind: Literal["counters"] = "counters"
    values: dict[str, float]


class WantBatch(WireMessage):
    """The learner asks for the groups of `step`; step equals the version they will train."""

    kind: Literal["want_batch"] = "want_batch"
    step: Count


class SetStaleness(WireMessage):
    """The learner sets the staleness bound under which groups are admitted from now on.

    Between 0 and the configured pipeline.max_staleness; groups that are open keep the bound they were
    admitted under. A learner that joins starts at the configured one.
    """

    kind: Literal["set_staleness"] = "set_staleness"
    max_staleness: Count


class LedgerCounts(WireMessage):
    """admitted = trained + dropped_stale + dropped_filtered + failed + queued + in_flight."""

    admitted: Count
    trained: Count
    dropped_stale: Count
    dropped_filtered: Count
    failed: Count
    queued: Count
    in_flight: Count


class GroupRef(WireMessage):
    """One group of a Batch; `num_frames` of the following frames are its payload."""

    group_id: Count
    generator: str
    num_frames: Count
    queued_s: float
    """Seconds between GroupDone and Batch."""


class Batch(WireMessage):
    """The groups of one step in order of admission; their payload frames follow."""

    kind: Literal["batch"] = "batch"
    step: Count
    groups: list[GroupRef]
    max_staleness: Count
    """The largest bound that was in force when any of its groups was admitted; no token is older."""

    cursor: Count
    """Ordinal of the first prompt that is not trained once this batch is."""

    ledger: LedgerCounts
    """As it stands once this batch is taken (its groups count as trained)."""

    counters: dict[str, float]
    """Generators' counters, summed, and the broker's."""

    evals: list[EvalDone]
    """Evaluations finished since the previous Batch."""


class WantEval(WireMessage):
    """The learner waits for the evaluation of `version` (after its last step)."""

    kind: Literal["want_eval"] = "want_eval"
    version: Count


class EvalResults(WireMessage):
    """Evaluations finished since the last Batch."""

    kind: Literal["eval_results"] = "eval_results"
    evals: list[EvalDone]


Message = (
    Hello | Welcome | Refuse | Beat | Bye | Stop | WantWork | Work | GroupDone | GroupFailed
    | Evaluate | EvalDone | Counters | WantBatch | SetStaleness | Batch | Announcement | WantEval
    | EvalResults | WantManifest | Manifest | WantChunk | Chunk | Gone
)  # fmt: skip

MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])
