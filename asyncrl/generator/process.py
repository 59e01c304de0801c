"""The generator: asks for work, samples, scores, sends, adopts; it never waits for the learner.

One loop on one thread drives the engine by single decode steps; beats, weight prefetch and scoring go on
beside it. Invariants: a version is reported (WantWork) only after the engine has adopted it; new weights
are adopted between two decode steps, and never while an evaluation is running, so that every evaluation
sample has one version; each started group ends in exactly one GroupDone or GroupFailed.
"""

import logging
import time
from collections import Counter

from asyncrl.config import RunConfig
from asyncrl.errors import PeerLostError, ProtocolError
from asyncrl.generator.adoption import Adopter
from asyncrl.generator.engine import Completion, Engine, SampleRequest
from asyncrl.generator.evaluation import Evaluation
from asyncrl.generator.groups import Sheaf
from asyncrl.generator.hopeless import check_scorer
from asyncrl.generator.prompts import PromptRenderer
from asyncrl.tasks.scoring import ScoringPool
from asyncrl.telemetry.trace import Tracer
from asyncrl.types import GROUPS_PER_EPOCH, Verdict
from asyncrl.weights.subscriber import Subscriber
from asyncrl.wire import messages as m
from asyncrl.wire.codec import encode_group
from asyncrl.wire.mailbox import Mailbox

log = logging.getLogger(__name__)

_IDLE_S = 0.1
"""How long an idle loop sleeps when nothing comes: scorers' deadlines and reports are not news."""

_REPORT_S = 0.25
"""Seconds between two reports of running totals."""

_MAX_WARNINGS = 100
"""Of one kind in the log of a generator."""


class Generator:
    """One engine and everything around it; built by `asyncrl generator`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        mailbox: Mailbox,
        engine: Engine,
        renderer: PromptRenderer,
        pool: ScoringPool,
        subscriber: Subscriber,
        tracer: Tracer,
    ) -> None:
        self._config = config
        self._mailbox = mailbox
        self._engine = engine
        self._renderer = renderer
        self._pool = pool
        self._subscriber = subscriber
        self._tracer = tracer
        self._epoch = 0
        self._sheaves: dict[int, Sheaf] = {}
        self._scoring: dict[int, tuple[int, int]] = {}  # verdict key -> (request id, index)
        self._next_key = 0
        self._evaluation: Evaluation | None = None
        self._asked: tuple[int, int] | None = None  # (epoch, version) of the open WantWork
        self._counts: Counter[str] = Counter()
        self._adopter = Adopter(engine, tracer)
        self._next_report_s = 0.0
        self._has_begun = False
        self._stop: m.Stop | None = None
        self._announced = (-1, -1)  # (epoch, version) of the newest Announcement that was handled
        if (announcement := mailbox.welcome.announcement) is not None:
            self._announced = (announcement.epoch, announcement.version)
            subscriber.start(announcement)
        mailbox.listen(self._prefetch)

    def _prefetch(self, message: m.Message) -> None:
        """From the mailbox's thread: a version is fetched while the loop is in the middle of a step."""
        if isinstance(message, m.Announcement):
            self._subscriber.start(message)

    def run(self) -> m.Stop:
        """Work until the broker says Stop; returns it."""
        while self._stop is None:
            self._receive()
            self._adopt()
            self._decode()
            self._collect_verdicts()
            self._ask_for_work()
            self._report()
        return self._stop

    def _receive(self) -> None:
        """Handle every message that has come; an idle engine waits here for any news."""
        if not self._engine.num_unfinished:
            with self._tracer.span(self._idle_cause):
                self._pool.rest(_IDLE_S, also=[self._mailbox.bell.fileno()])
        self._mailbox.bell.quiet()
        while (envelope := self._mailbox.receive(0.0)) is not None:
            self._handle(envelope.message)

    @property
    def _idle_cause(self) -> str:
        """What an idle engine lacks: scores it could send, else newer weights, else credit."""
        if not self._has_begun:
            return "generator/start"  # the learner may still be loading
        if self._pool.num_pending:
            return "generator/wait_score"
        return "generator/wait_weights" if self._subscriber.is_fetching else "generator/wait_credit"

    def _handle(self, message: m.Message) -> None:
        match message:
            case m.Work(starts=starts):
                self._asked = None
                self._has_begun = True
                for start in starts:
                    self._start(start)
            case m.Announcement(epoch=epoch, version=version):
                self._asked, self._announced = None, (epoch, version)  # fetched by `_prefetch`
            case m.Evaluate(version=version):
                self._has_begun = True
                self._evaluate(version)
            case m.Stop():
                self._stop = message
            case m.Refuse(reason=reason):
                raise PeerLostError(f"the broker refused this generator: {reason}")
            case _:
                raise ProtocolError(f"a generator does not expect {message.kind!r} from the broker")

    def _start(self, start: m.GroupStart) -> None:
        prompt = self._renderer.render("train", start.ordinal)
        num_tokens = int(prompt.tokens.shape[0])
        if not 0 < num_tokens <= self._config.engine.max_prompt_tokens:
            limit = self._config.engine.max_prompt_tokens
            self._count_trouble(
                "prompts/too_long",
                f"prompt {start.ordinal} has {num_tokens} tokens, engine.max_prompt_tokens={limit}",
            )
            self._fail(start.group_id, "prompt_too_long", retry=False)
            return
        size = self._config.pipeline.group_size
        self._sheaves[start.group_id] = Sheaf(prompt, size)
        self._engine.submit(
            SampleRequest(
                request_id=start.group_id,
                prompt_tokens=prompt.tokens,
                num_completions=size,
                seed=start.seed,
                max_tokens=self._max_tokens(num_tokens),
                temperature=self._config.sampling.temperature,
                top_p=self._config.sampling.top_p,
                top_k=self._config.sampling.top_k,
            )
        )

    def _max_tokens(self, num_prompt_tokens: int) -> int:
        """The completion limit, reduced to what the context has room for."""
        room = self._engine.max_context_tokens - num_prompt_tokens
        return max(1, min(self._config.engine.max_completion_tokens, room))

    def _fail(self, group_id: int, reason: str, *, retry: bool) -> None:
        facts = {"group_id": group_id, "reason": reason, "retry": retry}
        self._mailbox.send(m.GroupFailed.model_validate(facts))

    def _evaluate(self, version: int) -> None:
        if version != self._engine.version:
            raise ProtocolError(
                f"asked to evaluate version {version} while holding {self._engine.version}"
            )
        self._evaluation = Evaluation(self._config, version, self._renderer, self._max_tokens)
        for request_id, sheaf, request in self._evaluation.requests:
            self._sheaves[request_id] = sheaf
            self._engine.submit(request, first=True)

    def _adopt(self) -> None:
        """Swap weights between two decode steps, unless an evaluation needs the present ones."""
        if self._evaluation is not None:
            self._subscriber.prefer_newest()
            return
        # What came before an announcement is about the weights held then: an Evaluate, Work of an epoch.
        staged = self._subscriber.ready(self._announced)
        if staged is None:
            return
        if staged.epoch > self._epoch:
            self._abandon(staged.epoch)
        if (staged.epoch, staged.version) > (self._epoch, self._engine.version):
            self._adopter.adopt(staged)
            self._tracer.mark("version", version=staged.version, epoch=staged.epoch)
            self._epoch = staged.epoch
        staged.release()

    def _abandon(self, epoch: int) -> None:
        """A learner that came back begins new books: what was started for the old ones is void.

        What `epoch` itself has started meanwhile, under the initial model, is in the new books.
        """
        void = [each for each in self._sheaves if each < epoch * GROUPS_PER_EPOCH]
        for request_id in void:
            self._engine.abort(request_id)
            del self._sheaves[request_id]
        self._counts["groups/abandoned"] += len(void)

    def _decode(self) -> None:
        if not self._engine.num_unfinished:
            return
        name = "generator/eval" if self._evaluation is not None else "generator/decode"
        with self._tracer.span(name):
            finished = self._engine.step()
        for completion in finished:
            self._finish(completion)

    def _finish(self, completion: Completion) -> None:
        """Hand a finished completion to the scorers."""
        sheaf = self._sheaves[completion.request_id]
        text = self._renderer.decode(completion.tokens)
        sheaf.completions[completion.index] = completion
        sheaf.texts[completion.index] = text
        self._counts["sampled_tokens"] += int(completion.tokens.shape[0])
        self._counts[f"finish/{completion.finish_reason}"] += 1
        if completion.finish_reason == "abort":
            self._judge(completion.request_id, completion.index, Verdict(status="abstained"))
            return
        self._scoring[self._next_key] = (completion.request_id, completion.index)
        self._pool.submit(self._next_key, sheaf.prompt.problem, text)
        self._next_key += 1

    def _collect_verdicts(self) -> None:
        for key, verdict in self._pool.poll():
            self._judge(*self._scoring.pop(key), verdict)

    def _judge(self, request_id: int, index: int, verdict: Verdict) -> None:
        if verdict.status in ("error", "timeout"):
            self._count_trouble(f"verdict/{verdict.status}", verdict.detail)
        else:
            self._counts[f"verdict/{verdict.status}"] += 1
        check_scorer(self._counts, verdict, self._config.scoring)
        sheaf = self._sheaves.get(request_id)
        if sheaf is None:
            return  # abandoned while it was scored
        sheaf.verdicts[index] = verdict
        if not sheaf.complete:
            return
        del self._sheaves[request_id]
        if self._evaluation is not None and self._evaluation.owns(request_id):
            self._evaluation.finish(sheaf)
            if self._evaluation.done:
                self._mailbox.send(self._evaluation.result())
                self._evaluation = None
        elif not sheaf.usable:
            self._fail(request_id, "bad_logprobs", retry=True)
        else:
            self._send(request_id, sheaf)

    def _count_trouble(self, counter: str, text: str) -> None:
        """Count what goes on without us; the first of a kind are logged, so that no disk fills up."""
        self._counts[counter] += 1
        if self._counts[counter] <= _MAX_WARNINGS:
            log.warning("%s: %s", counter, text)
        if self._counts[counter] == _MAX_WARNINGS:
            log.warning("%s: further ones are only counted", counter)

    def _send(self, group_id: int, sheaf: Sheaf) -> None:
        group = sheaf.to_group(group_id)
        done = m.GroupDone(
            group_id=group_id,
            scores=[rollout.verdict.score for rollout in group.rollouts],
            num_tokens=group.num_completion_tokens,
            oldest_version=group.oldest_version,
        )
        self._mailbox.send(done, encode_group(group))

    def _ask_for_work(self) -> None:
        """Keep one request for work open, under the version that is really held."""
        held = (self._epoch, self._engine.version)
        free = self._config.engine.max_concurrent_completions - self._engine.num_unfinished
        num_groups = free // self._config.pipeline.group_size
        if num_groups > 0 and self._asked != held:
            self._mailbox.send(m.WantWork(epoch=held[0], version=held[1], num_groups=num_groups))
            self._asked = held

    def _report(self) -> None:
        """Send running totals."""
        now_s = time.monotonic()
        if now_s < self._next_report_s:
            return
        self._next_report_s = now_s + min(self._config.broker.beat_s, _REPORT_S)
        totals = {key: float(value) for key, value in self._counts.items()}
        totals |= self._adopter.totals | self._tracer.totals() | self._pool.usage()
        self._mailbox.send(m.Counters(values=totals))
