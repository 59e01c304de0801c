"""Scoring processes: how they start, how they end, and the tasks that they run."""

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec

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
from tests.unit.scorer_files import (
    PROBLEM,
    ROOT,
    SCORER,
    child_pids,
    collect,
    is_running,
    pool_of,
    scorer_task,
    until,
    verdict_on,
)

needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="extra gym")

pytestmark = pytest.mark.process

# --- starting and ending ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import no_such_module\ndef score(): ...",
            "cannot build the scorer of [task]: exit code 1",
        ),
        ("import no_such_module\ndef score(): ...", "No module named 'no_such_module' (/"),
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


def test_a_pool_can_be_waited_for_until_it_is_able_to_score(tmp_path):
    with pool_of(scorer_task(tmp_path), num_workers=2) as pool:
        pool.await_ready()
        assert verdict_on(pool, "number 1").score == 1.0
    with pool_of(scorer_task(tmp_path, "score = 3")) as pool, pytest.raises(ConfigError):
        pool.await_ready()


@needs_gym
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_animals": 2.5}, "ValueError: non-integer arg 1 for randrange() (/"),
        ({"size": 1}, "split of this task is empty"),  # its one item is of one split
    ],
)
def test_parameters_that_fail_in_the_first_problem_are_found_at_the_start(params, message):
    task = ReasoningGymTask(dataset="leg_counting", params=params)
    with pool_of(task) as pool, pytest.raises(ConfigError, match=re.escape(message)):
        pool.await_ready()


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
