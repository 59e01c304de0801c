"""The scoring pool against scorers that hang, crash, print and hog, each in real processes."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.types import Verdict
from asyncrl.wire.codec import decode_group, encode_group
from tests.reference.groups import group, rollout
from tests.unit.scorer_files import (
    PROBLEM,
    SCORER,
    child_pids,
    collect,
    is_running,
    pool_of,
    scorer_task,
    until,
    verdict_on,
)

pytestmark = pytest.mark.process


# --- scorers that misbehave ---------------------------------------------------------------------


def test_numbers_are_scores_and_everything_else_says_why_not(tmp_path):
    expected = {
        "number 0.25": ("scored", 0.25, ""),
        "number -3": ("scored", -3.0, ""),
        "yes": ("scored", 1.0, ""),
        "nothing": ("abstained", None, ""),
        "nan": ("error", None, "not finite, got nan"),
        "infinite": ("error", None, "not finite, got -inf"),
        "huge": ("error", None, "OverflowError"),
        "text": ("error", None, "not a number, got str"),
        "fail me": ("error", None, "KeyError: 'me'"),
        "deep": ("error", None, "RecursionError"),
        "talk": ("scored", 0.0, ""),  # stdin is empty; what went to stdout is not taken for a reply
        "code_point \ud800": ("scored", 0xD800, ""),  # a lone surrogate travels
    }
    with pool_of(scorer_task(tmp_path)) as pool:
        for key, completion in enumerate(expected):
            pool.submit(key, PROBLEM, completion)
        workers = child_pids()
        verdicts = collect(pool)
        assert child_pids() == workers  # none of these costs a process
    for key, (status, score, detail) in enumerate(expected.values()):
        assert (verdicts[key].status, verdicts[key].score) == (status, score)
        assert detail in verdicts[key].detail


def line_of(text):
    (number,) = [n for n, line in enumerate(SCORER.splitlines(), start=1) if text in line]
    return number


@pytest.mark.parametrize(
    ("completion", "said", "line"),
    [
        ("fail me", "KeyError: 'me'", "def fail(rest)"),
        ("fail_within 1", "KeyError: '1'", "def fail(rest)"),  # a function of the same file
        ("fail_in_a_library {", "JSONDecodeError: Expecting", "def fail_in_a_library(rest)"),
        ("unknown x", "KeyError: 'unknown'", "return globals()"),
    ],
)
def test_an_exception_names_the_innermost_line_of_the_scorers_own_file(
    tmp_path, completion, said, line
):
    with pool_of(scorer_task(tmp_path)) as pool:
        detail = verdict_on(pool, completion).detail
    assert detail.startswith(said)
    assert detail.endswith(f" (scorer.py:{line_of(line)})")


NOT_CALLABLE_WITH_WHAT_IT_ASKS_FOR = """
import functools
def real(completion): return 1.0
@functools.wraps(real)
def score(): return 1.0
"""


def test_an_exception_that_no_line_of_the_scorer_has_raised_names_none(tmp_path):
    with pool_of(scorer_task(tmp_path, NOT_CALLABLE_WITH_WHAT_IT_ASKS_FOR)) as pool:
        detail = verdict_on(pool, "x").detail
    assert detail.startswith("TypeError: ")
    assert ".py" not in detail


def test_long_exception_texts_are_cut_to_200_characters(tmp_path):
    with pool_of(scorer_task(tmp_path)) as pool:
        line = line_of('raise ValueError("x" * 10**6)')
        place = f" (scorer.py:{line})"
        detail = verdict_on(pool, "fail_at_length").detail
        assert detail == ("ValueError: " + "x" * 1000)[: 200 - len(place)] + place
        # An escape is 6 characters long: 12 + 6 * 31 + 1 = 199.
        detail = verdict_on(pool, "refuse " + "\udc80" * 100).detail
        assert detail == "ValueError: " + r"\udc80" * 31 + "\\\u2026"


@pytest.mark.parametrize(
    ("completion", "status", "detail"),
    [
        ("refuse half \udc80 pair", "error", r"ValueError: half \udc80 pair"),
        ("refuse \x1b[2J\x1b]0;title\x07", "error", "ValueError: \u00b7[2J\u00b7]0;title\u00b7"),
        ("refuse two\nlines \u202e", "error", "ValueError: two\u23celines \u00b7"),
        ("refuse caf\u00e9 \U0001f600", "error", "ValueError: caf\u00e9 \U0001f600"),
        (
            "refuse_and_leave \x1b[2J\udc80",  # the three bytes are no UTF-8
            "error",
            "the scoring process ended: exit code 3 \u00b7[2J\ufffd\ufffd\ufffd",
        ),
        ("answer_for_itself \x1b[2J\udc80", "error", "\u00b7[2J\\udc80"),
        ("answer_for_itself number", "error", "the scoring process broke its protocol: "),
    ],
)
def test_what_a_scorer_says_is_one_printable_line_that_can_be_sent(
    tmp_path, completion, status, detail
):
    with pool_of(scorer_task(tmp_path)) as pool:
        verdict = verdict_on(pool, completion)
    assert (verdict.status, verdict.detail[: len(detail)]) == (status, detail)
    assert verdict.detail.isprintable()
    sent = group([1], [replace(rollout([2]), verdict=verdict)])
    assert decode_group(encode_group(sent)).rollouts[0].verdict == verdict


@pytest.mark.parametrize("kind", ["hang", "burn"])
def test_a_scorer_that_hangs_is_a_timeout_and_the_next_item_is_scored(tmp_path, kind):
    with pool_of(scorer_task(tmp_path), deadline_s=0.4) as pool:
        hung = child_pids()
        pool.submit(1, PROBLEM, kind)
        pool.submit(2, PROBLEM, "number 2")
        verdicts = collect(pool)
        assert not any(map(is_running, hung))
    assert verdicts[1].status == "timeout"
    assert "scoring.deadline_s=0.4" in verdicts[1].detail
    assert verdicts[2] == Verdict(status="scored", score=2.0)


@pytest.mark.parametrize(
    ("kind", "detail"),
    [
        ("leave", "exit code 3"),
        ("leave_politely", "exit code 4"),
        ("crash", "killed by SIGSEGV"),
        ("suicide", "killed by SIGKILL"),
        ("hog", "scoring.max_memory_bytes"),
        ("hog_at_once", "scoring.max_memory_bytes"),
        ("forge", "broke its protocol"),
        ("lie", "broke its protocol: a verdict on 3, which was not next"),
    ],
)
def test_a_process_that_dies_is_an_error_naming_how_and_is_replaced(tmp_path, kind, detail):
    with pool_of(scorer_task(tmp_path), max_memory_bytes=2**28) as pool:
        before = child_pids()
        for key in range(4):
            pool.submit(key, PROBLEM, kind if key == 1 else f"number {key}")
        verdicts = collect(pool)
        assert child_pids().isdisjoint(before)
        assert len(child_pids()) == 1
    blamed = verdicts.pop(1)
    assert blamed.status == "error"
    assert detail in blamed.detail
    assert {key: verdict.score for key, verdict in verdicts.items()} == {0: 0.0, 2: 2.0, 3: 3.0}


def test_what_a_killed_scorer_started_is_killed_too(tmp_path):
    pid_file = tmp_path / "pid"
    with pool_of(scorer_task(tmp_path), deadline_s=1.0) as pool:
        assert verdict_on(pool, f"breed {pid_file}").status == "timeout"
    until(lambda: not is_running(int(pid_file.read_text())))


def test_a_scorer_that_prints_megabytes_fills_no_disk(tmp_path):
    with pool_of(scorer_task(tmp_path)) as pool:
        (worker,) = child_pids()
        assert verdict_on(pool, "flood") == Verdict(status="scored", score=1.0)  # 8 MiB printed
        assert verdict_on(pool, "number 1").score == 1.0
        assert Path(f"/proc/{worker}/fd/2").stat().st_size <= 2**20


# --- accounting ---------------------------------------------------------------------------------


def test_a_thousand_items_each_get_their_own_verdict_through_deaths_and_timeouts(tmp_path):
    kinds = {123: "leave", 124: "crash", 500: "fail", 501: "nothing", 777: "hang", 999: "suicide"}
    with pool_of(scorer_task(tmp_path), num_workers=2, deadline_s=2.0) as pool:
        verdicts = {}
        for key in range(1000):
            pool.submit(key, PROBLEM, kinds.get(key, f"number {key}"))
            verdicts.update(pool.poll() if key % 7 == 0 else ())
        assert pool.num_pending == 1000 - len(verdicts)
        later = collect(pool)
    assert later.keys().isdisjoint(verdicts)
    verdicts |= later
    assert sorted(verdicts) == list(range(1000))
    odd = {key: verdicts.pop(key).status for key in kinds}
    assert odd == {
        123: "error", 124: "error", 500: "error", 501: "abstained", 777: "timeout", 999: "error"
    }  # fmt: skip
    assert all(verdict.score == key for key, verdict in verdicts.items())


def test_the_scorer_is_built_once_for_each_worker(tmp_path):
    log = tmp_path / "imports"
    source = SCORER + f"\nwith open({str(log)!r}, 'a') as file: file.write('imported\\n')\n"
    with pool_of(scorer_task(tmp_path, source), num_workers=2) as pool:
        for key in range(1000):
            pool.submit(key, PROBLEM, f"number {key}")
        assert len(collect(pool)) == 1000
        until(lambda: len(log.read_text().split()) == 2)
    assert len(log.read_text().split()) == 2


def test_a_key_can_be_used_again_only_after_its_verdict(tmp_path):
    with pool_of(scorer_task(tmp_path)) as pool:
        pool.submit(5, PROBLEM, "number 1")
        with pytest.raises(ValueError, match="key 5 is pending"):
            pool.submit(5, PROBLEM, "number 2")
        assert collect(pool)[5].score == 1.0
        pool.submit(5, PROBLEM, "number 2")
        assert collect(pool)[5].score == 2.0


# --- time ---------------------------------------------------------------------------------------


def test_the_start_of_a_worker_does_not_count_against_the_deadline(tmp_path):
    source = "import time\ntime.sleep(1.8)\n" + SCORER
    with pool_of(scorer_task(tmp_path, source), deadline_s=1.6) as pool:
        assert verdict_on(pool, f"nap {tmp_path / 'log'}").status == "scored"


def test_every_item_has_a_clock_of_its_own(tmp_path):
    with pool_of(scorer_task(tmp_path), deadline_s=1.6) as pool:
        for key in range(4):  # given away together; 4 * 0.5 s is longer than the deadline
            pool.submit(key, PROBLEM, f"nap {tmp_path / 'log'}")
        assert [verdict.status for verdict in collect(pool).values()] == ["scored"] * 4


def test_the_time_that_a_worker_was_idle_is_not_the_next_items(tmp_path):
    with pool_of(scorer_task(tmp_path), deadline_s=1.6) as pool:
        assert verdict_on(pool, "number 1").score == 1.0
        time.sleep(1.8)  # longer than the deadline
        assert verdict_on(pool, f"nap {tmp_path / 'log'}").status == "scored"


def test_a_caller_who_polls_late_finds_verdicts(tmp_path):
    log = tmp_path / "log"
    log.touch()
    verdicts = []
    with pool_of(scorer_task(tmp_path), deadline_s=1.6) as pool:
        for key in range(4):
            pool.submit(key, PROBLEM, f"nap {log}")
        until(log.read_text, step=lambda: verdicts.extend(pool.poll()))
        until(lambda: log.read_text().count("done") == 4)  # 4 * 0.5 s: longer than the deadline
        verdicts.extend(collect(pool).items())
    assert sorted(verdicts, key=lambda pair: pair[0]) == [
        (key, Verdict(status="scored", score=1.0)) for key in range(4)
    ]


def test_a_large_completion_never_blocks_the_caller(tmp_path):
    with pool_of(scorer_task(tmp_path), deadline_s=60.0) as pool:
        assert verdict_on(pool, "number 1").score == 1.0
        (worker,) = child_pids()
        os.kill(worker, signal.SIGSTOP)  # now nobody reads the pipe
        pool.submit(1, PROBLEM, "length " + "x" * 5_000_000)
        for _ in range(3):
            assert pool.poll() == []
        os.kill(worker, signal.SIGCONT)
        assert collect(pool)[1].score == 5_000_000


def test_an_item_that_a_dead_worker_had_only_in_part_is_scored_by_the_next(tmp_path):
    with pool_of(scorer_task(tmp_path)) as pool:
        assert verdict_on(pool, "number 1").score == 1.0
        (worker,) = child_pids()
        os.kill(worker, signal.SIGSTOP)
        pool.submit(1, PROBLEM, "length " + "x" * 5_000_000)
        assert pool.poll() == []
        os.kill(worker, signal.SIGKILL)
        assert collect(pool)[1].score == 5_000_000
