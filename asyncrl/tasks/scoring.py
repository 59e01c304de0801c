"""The pool of scoring processes of a generator: each submitted completion gets exactly one verdict.

Scorers may hang, crash, print and eat memory; they run in processes that are killed and replaced,
and the caller never waits for one. A worker holds up to DEPTH items and scores them in order; only
the first can be the one it is working on, so death and deadline are blamed on that one alone and
the others are given to another worker.

| the scorer                               | verdict                                               |
|------------------------------------------|-------------------------------------------------------|
| returns a finite number / None           | scored / abstained                                    |
| raises, returns NaN, inf or no number    | error, with the exception's text and line             |
| takes longer than deadline_s             | timeout; the process is killed                        |
| exits, crashes, passes the memory limit  | error, naming exit code or signal; a fresh process    |
| cannot be imported or built              | none: ConfigError from `poll`, with what was printed  |

A verdict's detail is one line of at most MAX_DETAIL_CHARS printable characters, whatever a scorer said.

The clock of an item runs from when its worker had it and was free; a worker's start does not count.
Both sides use CLOCK_MONOTONIC, so that a caller who polls late finds verdicts, not timeouts.
"""

import json
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks.base import Problem
from asyncrl.tasks.handle import Item, WorkerHandle, describe_end
from asyncrl.tasks.worker import MAX_DETAIL_CHARS
from asyncrl.telemetry.terminal import plain
from asyncrl.types import Verdict

DEPTH = 8
"""Items given to a worker ahead of time, so that polling seldom does not slow scoring down."""

MAX_BLAMELESS_DEATHS = 3
"""In a row, with no item that a death could be blamed on, before the pool gives up."""

MAX_NAP_S = 0.1


class ScoringPool:
    """Scores completions in `num_workers` processes without ever blocking its caller.

    Owned by one thread, which must live as long as the pool: the workers die with the thread that
    started them.
    """

    def __init__(
        self,
        task_config: TaskConfig,
        seed: int,
        *,
        num_workers: int,
        deadline_s: float,
        max_memory_bytes: int,
        start_timeout_s: float = 120.0,
        on_busy: Callable[[int, float, float], None] | None = None,
    ) -> None:
        """Start the workers; they build their scorers while the caller goes on.

        `on_busy` is told which worker (0 .. num_workers - 1) was at work from when to when, in seconds
        of time.monotonic(), once for every item that it scored or was killed over.
        """
        self._settings = json.dumps(
            {
                "task": task_config.model_dump(mode="json"),
                "seed": seed,
                "max_memory_bytes": max_memory_bytes,
                "parent_pid": os.getpid(),
            }
        )
        self._deadline_s = deadline_s
        self._start_timeout_s = start_timeout_s
        self._waiting: deque[Item] = deque()
        self._pending: set[int] = set()
        self._verdicts: list[tuple[int, Verdict]] = []
        self._num_blameless_deaths = 0
        self._failure: ConfigError | None = None
        self._on_busy = on_busy
        self._busy_s = 0.0
        self._start_s = time.monotonic()
        self._workers = [WorkerHandle(self._settings) for _ in range(num_workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_pending(self) -> int:
        """Submitted keys whose verdict was not handed out yet."""
        return len(self._pending)

    def usage(self) -> dict[str, float]:
        """Seconds of all workers since the start: scorer/score, and the rest as scorer/other."""
        now_s = time.monotonic()
        at_work = [worker for worker in self._workers if worker.items and worker.items[0].is_sent]
        busy_s = self._busy_s + sum(now_s - worker.head_began_s() for worker in at_work)
        whole_s = len(self._workers) * (now_s - self._start_s)
        return {"scorer/score": busy_s, "scorer/other": whole_s - busy_s}

    def submit(self, key: int, problem: Problem, completion: str) -> None:
        """Queue one completion; `key` (0 <= key < 2^64) comes back with its verdict.

        Raises:
            ValueError: this key is pending already.
        """
        if key in self._pending:
            raise ValueError(f"key {key} is pending already; each submission needs one of its own")
        self._pending.add(key)
        self._waiting.append(Item(key, problem, completion))

    def await_ready(self) -> None:
        """Sleep until every worker has built its scorer; before anything is submitted.

        Raises:
            ConfigError: as `poll`.
        """
        while not all(worker.is_ready for worker in self._workers):
            self.poll()
            self.rest(MAX_NAP_S)

    def poll(self) -> list[tuple[int, Verdict]]:
        """Verdicts that are there; never blocks.

        Raises:
            ConfigError: workers cannot start, or die without an item that could be blamed.
        """
        if self._failure is not None:
            raise self._failure
        try:
            for index in range(len(self._workers)):
                self._attend(index)
            self._hand_out()
        except ConfigError as error:
            self._failure = error
            raise
        verdicts, self._verdicts = self._verdicts, []
        self._pending.difference_update(key for key, _ in verdicts)
        return verdicts

    def wait(self, timeout_s: float) -> list[tuple[int, Verdict]]:
        """As `poll`, but sleep until there is a verdict, nothing is pending, or the time is up."""
        end_s = time.monotonic() + timeout_s
        while True:
            verdicts = self.poll()
            left_s = end_s - time.monotonic()
            if verdicts or not self._pending or left_s <= 0:
                return verdicts
            self.rest(left_s)

    def rest(self, timeout_s: float, *, also: Sequence[int] = ()) -> None:
        """Sleep until a worker has news, one of the file descriptors `also` is readable, or the time
        is up; never longer than MAX_NAP_S, since deadlines are kept by `poll`.
        """
        with selectors.DefaultSelector() as selector:
            for descriptor in also:
                selector.register(descriptor, selectors.EVENT_READ)
            for worker in self._workers:
                selector.register(worker.stdout, selectors.EVENT_READ)
                if worker.has_unsent:
                    selector.register(worker.stdin, selectors.EVENT_WRITE)
            selector.select(min(timeout_s, MAX_NAP_S))

    def close(self) -> None:
        """Kill the workers; what is pending gets no verdict."""
        while self._workers:
            self._workers.pop().end()
        self._waiting.clear()
        self._pending.clear()

    def _attend(self, index: int) -> None:
        """Take one worker's replies, and replace it if it ended or overran its time."""
        worker = self._workers[index]
        has_ended = worker.has_ended  # asked first: all that it wrote before is in the pipe by now
        try:
            for reply in worker.receive():
                self._take(index, reply)
        except (ValueError, TypeError) as error:
            self._replace(index, "error", f"the scoring process broke its protocol: {error}")
            return
        worker.send()
        worker.trim_stderr()
        now_s = time.monotonic()
        if has_ended:
            self._replace(index, "error", "the scoring process ended")
        elif worker.items and now_s - worker.head_began_s() > self._deadline_s:
            reason = f"no verdict within scoring.deadline_s={self._deadline_s:g}"
            self._replace(index, "timeout", reason)
        elif not worker.is_ready and now_s - worker.started_s > self._start_timeout_s:
            raise ConfigError(
                f"a scoring process did not start within {self._start_timeout_s:g} s; the import of "
                "task.scorer, or the making of a data set's first problem, may hang. It printed: "
                f"{worker.stderr_tail() or 'nothing'}"
            )

    def _take(self, index: int, reply: list[Any]) -> None:
        """Act on one reply (worker.py's table).

        Raises:
            ValueError, TypeError: it is none of that table, or not about the worker's first item.
        """
        worker = self._workers[index]
        match reply:
            case ["ready"] if not worker.is_ready:
                worker.is_ready = True
                worker.free_s = time.monotonic()
            case [
                "verdict",
                key,
                "scored" | "abstained" | "error" as status,
                score,
                str(detail),
                float(done_s),
            ]:
                if not worker.items or worker.items[0].key != key:
                    raise ValueError(f"a verdict on {key!r}, which was not next")
                verdict = Verdict(status=status, score=score, detail=_one_line(detail))
                self._was_busy(index, done_s)
                worker.free_s = done_s
                self._settle(worker.items.popleft(), verdict)
            case _:
                raise ValueError(f"unknown reply {str(reply)[:80]}")

    def _was_busy(self, index: int, until_s: float) -> None:
        """A worker was at its first item until then, by a clock that may be forged."""
        began_s, now_s = self._workers[index].head_began_s(), time.monotonic()
        # The process may be done before the time at which it was given its item is noted down.
        end_s = min(max(began_s, until_s), now_s)
        self._busy_s += end_s - began_s
        if self._on_busy is not None:
            self._on_busy(index, began_s, end_s)

    def _settle(self, item: Item, verdict: Verdict) -> None:
        self._verdicts.append((item.key, verdict))
        self._num_blameless_deaths = 0

    def _replace(self, index: int, status: Literal["timeout", "error"], reason: str) -> None:
        """End a worker, blame its first item, give back the others, start a fresh one."""
        worker = self._workers[index]
        printed = worker.stderr_tail()
        if worker.items and worker.items[0].is_sent:
            self._was_busy(index, time.monotonic())
        code = worker.end()
        self._workers[index] = WorkerHandle(self._settings)
        if worker.items and worker.items[0].is_sent:
            detail = reason
            if status == "error":
                detail += f": {describe_end(code)} {printed[-100:]}"
            verdict = Verdict(status=status, detail=_one_line(detail.strip()))
            self._settle(worker.items.popleft(), verdict)
        else:
            self._bear_blameless_death(code, printed, was_ready=worker.is_ready)
        for item in reversed(worker.items):
            item.num_sent = 0
            self._waiting.appendleft(item)

    def _bear_blameless_death(self, code: int, printed: str, *, was_ready: bool) -> None:
        """Let few pass; a process that left by itself while it started would do so again."""
        self._num_blameless_deaths += 1
        said = f"{describe_end(code)}. It printed: {printed or 'nothing'}"
        if code >= 0 and not was_ready:
            raise ConfigError(f"a scoring process cannot build the scorer of [task]: {said}")
        if self._num_blameless_deaths >= MAX_BLAMELESS_DEATHS:
            raise ConfigError(
                f"{self._num_blameless_deaths} scoring processes in a row ended before they scored "
                f"anything (scoring.max_memory_bytes too small?); the last one: {said}"
            )

    def _hand_out(self) -> None:
        """Give waiting items to the workers that hold the fewest."""
        ready = [worker for worker in self._workers if worker.is_ready]
        while ready and self._waiting:
            worker = min(ready, key=lambda each: len(each.items))
            if len(worker.items) >= DEPTH:
                break
            worker.items.append(self._waiting.popleft())
        for worker in ready:
            worker.send()


def _one_line(detail: str) -> str:
    """What a scorer said, as a verdict may hold it: no control character, no half of a surrogate pair."""
    return plain(detail.encode(errors="backslashreplace").decode(), MAX_DETAIL_CHARS)
