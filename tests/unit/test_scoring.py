"""The scoring pool against scorers that hang, crash, print and hog, each in real processes."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.config import (
    JsonlTask,
    ProductsTask,
    ReasoningGymTask,
    RepeatLetterTask,
    ReverseDigitsTask,
)
from asyncrl.errors import ConfigError
from asyncrl.tasks import make_task
from asyncrl.tasks.base import Problem
from asyncrl.tasks.scoring import ScoringPool
from asyncrl.types import Verdict

needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="extra gym")

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = Problem(raw_text="q", answer="a")
PATIENCE_S = 60.0
"""How long a test waits for what should come at once; only a failing test takes it."""

SCORER = """
import ctypes, math, os, signal, subprocess, sys, time

def score(completion):
    kind, _, rest = completion.partition(" ")
    return globals()[kind](rest)

def number(rest): return float(rest)
def length(rest): return len(rest)
def code_point(rest): return ord(rest)
def hang(rest):
    while True: pass
def burn(rest): return float((5**5) ** (5**11) > 1)
def hog(rest):
    kept = []
    while True: kept.append(bytearray(2**20))
def hog_at_once(rest): return len(bytearray(2**40))
def fail(rest): raise KeyError(rest)
def fail_at_length(rest): raise ValueError("x" * 10**6)
def deep(rest): return deep(rest)
def nan(rest): return math.nan
def infinite(rest): return -math.inf
def huge(rest): return 10**400
def text(rest): return "1.0"
def yes(rest): return True
def nothing(rest): return None
def leave(rest): os._exit(3)
def leave_politely(rest): sys.exit(4)
def crash(rest): ctypes.string_at(0)
def suicide(rest): os.kill(os.getpid(), signal.SIGKILL)
def talk(rest):
    print("talk " * 1000, flush=True)
    os.write(1, b"\\xff" * 1000)
    return float(len(sys.stdin.read()))
def flood(rest):
    for _ in range(64): os.write(1, b"x" * 2**17)
    return 1.0
def forge(rest):
    for fd in range(3, 20):
        try: os.write(fd, b"\\x00\\x00\\x00\\x02hi")
        except OSError: pass
    hang(rest)
def lie(rest):
    from asyncrl.tasks.worker import pack_frame
    for fd in range(3, 20):
        try: os.write(fd, pack_frame("verdict", 3, "scored", 9.0, "", 0.0))
        except OSError: pass
    hang(rest)
def breed(rest):
    child = subprocess.Popen(["sleep", "600"])
    with open(rest, "w") as file: file.write(str(child.pid) + "\\n")
    hang(rest)
def nap(rest):
    with open(rest, "a") as file: file.write("began\\n")
    time.sleep(0.5)
    with open(rest, "a") as file: file.write("done\\n")
    return 1.0
"""


def scorer_task(tmp_path, source=SCORER, *, name="score"):
    path = tmp_path / "scorer.py"
    path.write_text(source)
    return JsonlTask(path="unread.jsonl", scorer=f"{path}:{name}")


def pool_of(task, *, num_workers=1, deadline_s=30.0, max_memory_bytes=2**29, **settings):
    return ScoringPool(
        task,
        0,
        num_workers=num_workers,
        deadline_s=deadline_s,
        max_memory_bytes=max_memory_bytes,
        **settings,
    )


def collect(pool):
    """All pending verdicts by key; fails on a key that comes twice."""
    verdicts: dict[int, Verdict] = {}
    end_s = time.monotonic() + PATIENCE_S
    while pool.num_pending:
        assert time.monotonic() < end_s, f"{pool.num_pending} items got no verdict"
        for key, verdict in pool.wait(1.0):
            assert key not in verdicts, f"two verdicts on {key}"
            verdicts[key] = verdict
    assert pool.poll() == []
    return verdicts


def verdict_on(pool, completion, problem=PROBLEM):
    pool.submit(0, problem, completion)
    return collect(pool)[0]


def child_pids(pid=None):
    text = Path(f"/proc/{pid or os.getpid()}/task/{pid or os.getpid()}/children").read_text()
    return set(map(int, text.split()))


def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def until(claim, *, step=lambda: None):
    end_s = time.monotonic() + PATIENCE_S
    while not claim():
        assert time.monotonic() < end_s, "it did not come true"
        step()
        time.sleep(0.005)


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


def test_long_exception_texts_are_cut_to_200_characters(tmp_path):
    with pool_of(scorer_task(tmp_path)) as pool:
        assert verdict_on(pool, "fail_at_length").detail == ("ValueError: " + "x" * 1000)[:200]


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


# --- starting and ending ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import no_such_module\ndef score(): ...",
            "cannot build the scorer of [task]: exit code 1",
        ),
        ("import no_such_module\ndef score(): ...", "No module named 'no_such_module'"),
        ("def score(text): return 1.0", "asks for an argument 'text'"),
        ("def score(completion, /): return 1.0", "asks for an argument 'completion'"),
        ("score = 3", "is not a function, got int"),
        ("import os\nos._exit(9)\ndef score(completion): ...", "exit code 9"),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\ndef score(): ...",
            "3 scoring processes in a row ended",
        ),
    ],
)
def test_a_scorer_that_cannot_start_ends_the_run_with_its_own_words(tmp_path, source, message):
    with pool_of(scorer_task(tmp_path, source)) as pool:
        pool.submit(0, PROBLEM, "number 1")
        with pytest.raises(ConfigError) as caught:
            collect(pool)
        assert message in str(caught.value)
        with pytest.raises(ConfigError):  # and it stays ended
            pool.poll()
    assert not child_pids()


def test_a_scorer_that_hangs_while_it_starts_ends_the_run(tmp_path):
    source = "print('loading', flush=True)\nwhile True: pass\ndef score(completion): ..."
    with (
        pool_of(scorer_task(tmp_path, source), start_timeout_s=1.0) as pool,
        pytest.raises(ConfigError, match=r"did not start within 1 s.*loading"),
    ):
        until(lambda: False, step=pool.poll)


def test_too_little_memory_to_start_names_the_setting(tmp_path):
    source = "kept = bytearray(2**27)\n" + SCORER
    with pool_of(scorer_task(tmp_path, source), max_memory_bytes=2**26) as pool:
        with pytest.raises(ConfigError) as caught:
            until(lambda: False, step=pool.poll)
        assert "MemoryError" in str(caught.value)


def test_closing_ends_every_process_even_a_hung_one(tmp_path):
    pool = pool_of(scorer_task(tmp_path), num_workers=2)
    pool.submit(0, PROBLEM, f"breed {tmp_path / 'pid'}")
    until((tmp_path / "pid").exists, step=pool.poll)
    workers = child_pids()
    assert len(workers) == 2
    pool.close()
    pool.close()
    assert not child_pids() & workers
    assert pool.num_pending == 0


def test_workers_die_with_their_parent_even_while_they_hang(tmp_path):
    script = (
        "import sys; from asyncrl.config import JsonlTask; from asyncrl.tasks.base import Problem\n"
        "from asyncrl.tasks.scoring import ScoringPool\n"
        "pool = ScoringPool(JsonlTask(path='x', scorer=sys.argv[1]), 0, num_workers=2,\n"
        "                   deadline_s=600, max_memory_bytes=2**29)\n"
        "pool.submit(0, Problem(raw_text='q', answer='a'), sys.argv[2])\n"
        "while True: pool.wait(1.0)"
    )
    task = scorer_task(tmp_path)
    command = [sys.executable, "-c", script, task.scorer, f"breed {tmp_path / 'pid'}"]
    with subprocess.Popen(command, cwd=ROOT) as parent:
        until((tmp_path / "pid").exists)
        until(lambda: (tmp_path / "pid").read_text().endswith("\n"))
        workers = child_pids(parent.pid)
        parent.kill()
    assert len(workers) == 2
    until(lambda: not any(map(is_running, workers)))
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_the_pool_works_from_any_folder_and_with_a_relative_scorer(tmp_path, monkeypatch):
    scorer_task(tmp_path)
    (tmp_path / "json.py").write_text("raise ImportError('shadowed')")
    monkeypatch.chdir(tmp_path)
    with pool_of(JsonlTask(path="unread.jsonl", scorer="scorer.py:score")) as pool:
        assert verdict_on(pool, "number 1").score == 1.0


# --- tasks through the pool ---------------------------------------------------------------------


def test_a_scorer_gets_what_it_names_and_gold_is_not_swapped_with_completion(tmp_path):
    source = (
        "def score(answer, completion, prompt):\n"
        "    assert prompt in ('q', [{'role': 'user', 'content': 'q'}])\n"
        "    return completion.startswith(answer) + 2 * isinstance(prompt, list)\n"
        "def bag(**given): return sorted(given) == ['answer', 'completion', 'prompt']\n"
        "def some(completion, *, answer='', n=4): return len(completion) <= n and answer == 'ab'\n"
    )
    raw = Problem(raw_text="q", answer="ab")
    chat = Problem(messages=({"role": "user", "content": "q"},), answer="ab")
    with pool_of(scorer_task(tmp_path, source)) as pool:
        assert verdict_on(pool, "abc", raw).score == 1.0
        assert verdict_on(pool, "a", raw).score == 0.0
        assert verdict_on(pool, "abc", chat).score == 3.0
    for name in ("bag", "some"):
        with pool_of(scorer_task(tmp_path, source, name=name)) as pool:
            assert verdict_on(pool, "abc", raw).score == 1.0


@pytest.mark.parametrize(
    "config",
    [
        ReverseDigitsTask(),
        ProductsTask(),
        RepeatLetterTask(),
        pytest.param(ReasoningGymTask(dataset="letter_counting"), marks=needs_gym),
    ],
    ids=["reverse_digits", "products", "repeat_letter", "reasoning_gym"],
)
def test_gold_earns_one_and_empty_or_hostile_text_earns_zero_in_the_pool(config):
    task = make_task(config, seed=0)
    hostile = "__import__('os')._exit(3)"
    with pool_of(config, max_memory_bytes=2**30) as pool:
        for ordinal in range(20):
            problem = task.problem("train", ordinal)
            pool.submit(3 * ordinal, problem, problem.answer)
            pool.submit(3 * ordinal + 1, problem, "")
            pool.submit(3 * ordinal + 2, problem, hostile)
        verdicts = collect(pool)
    assert all(verdict.status == "scored" for verdict in verdicts.values())
    assert [verdicts[key].score for key in range(0, 60, 3)] == [1.0] * 20
    assert [verdicts[key].score for key in range(1, 60, 3)] == [0.0] * 20
    if config.kind != "repeat_letter":
        assert [verdicts[key].score for key in range(2, 60, 3)] == [0.0] * 20
