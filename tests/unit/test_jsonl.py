"""Prompt files and their scorers: every fault is found at the start and named by its line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import (
    JsonlTask,
)
from asyncrl.errors import ConfigError
from asyncrl.tasks import make_scorer, make_task
from asyncrl.tasks.base import Problem

ROOT = Path(__file__).resolve().parents[2]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlTask(path=str(path), held_out_fraction=0.3)


def asked(task, split, count):
    return [task.problem(split, ordinal) for ordinal in range(count)]


# --- jsonl --------------------------------------------------------------------------------------

GOOD = '{"prompt": "q", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ("\n \n", "holds no rows"),
        (GOOD + "{broken\n", ":2: not a line of JSON"),
        (GOOD + '{"prompt":\n', ":2: not a line of JSON: Expecting value: column 11"),
        (GOOD + "[1]\n", ":2: expected an object, got list"),
        (GOOD + "\n" + '{"prompt": "q"}\n', ":3: the key 'answer' is missing"),
        ('{"answer": "a"}\n', ":1: the key 'prompt' is missing"),
        ('{"prompt": "q", "answer": true}\n', ":1: answer must be text, got bool"),
        ('{"prompt": "q", "answer": " "}\n', ":1: answer is empty"),
        ('{"prompt": 3, "answer": "a"}\n', ":1: prompt must be a text or a list of messages"),
        ('{"prompt": "", "answer": "a"}\n', ":1: prompt must be"),
        ('{"prompt": [], "answer": "a"}\n', ":1: prompt must be"),
        ('{"prompt": ["hi"], "answer": "a"}\n', ":1: prompt[0] must be"),
        ('{"prompt": [{"role": "bot", "content": "x"}], "answer": "a"}\n', ":1: prompt[0] must be"),
        ('{"prompt": [{"role": "user"}], "answer": "a"}\n', ":1: prompt[0] must be"),
        (
            '{"prompt": [{"role": "assistant", "content": "x"}], "answer": "a"}\n',
            ":1: the last message must be the user's",
        ),
        (
            GOOD + r'{"prompt": "q", "answer": "ab\udc80"}' + "\n",
            r":2: answer holds half of a surrogate pair, \udc80 at character 2",
        ),
        (r'{"prompt": "\ud83d", "answer": "a"}', r":1: prompt holds half of a surrogate pair"),
        (
            r'{"prompt": [{"role": "user", "content": "\udc80\ud83d"}], "answer": "a"}',
            r":1: prompt[0] holds half of a surrogate pair, \udc80 at character 0",
        ),
        (GOOD * 5, "split is empty, 5 rows"),
        ("[" * 100_000 + "\n", ":1: not a line of JSON"),
    ],
)
def test_faulty_files_are_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        make_task(JsonlTask(path=str(path)), seed=0)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_whole_surrogate_pair_and_keys_that_are_not_used_are_taken(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [rf'{{"prompt": "{i}", "answer": "\ud83d\ude00", "more": "\udc80"}}' for i in range(40)]
    path.write_text("\n".join(rows))
    task = make_task(JsonlTask(path=str(path)), seed=0)
    assert task.problem("train", 0).answer == "\U0001f600"


def test_bytes_that_are_no_utf8_are_refused_with_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() + b'{"prompt": "\xff", "answer": "a"}\n')
    with pytest.raises(ConfigError, match=":2: not a line of JSON"):
        make_task(JsonlTask(path=str(path)), seed=0)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        make_task(JsonlTask(path=str(tmp_path / "none.jsonl")), seed=0)


def test_gold_answers_that_no_completion_could_earn_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "q", "answer": "seven"}\n')
    with pytest.raises(ConfigError, match=r":1: answer is not an integer, got 'seven'"):
        make_task(JsonlTask(path=str(path), scorer="last_integer"), seed=0)


def test_text_prompts_are_raw_and_message_lists_are_chats(tmp_path):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "caf\u00e9 \U0001f600"},
    ]
    rows = [{"prompt": f"q{i}", "answer": "a", "more": 1} for i in range(20)]
    rows += [
        {"prompt": [*messages[:1], {"role": "user", "content": f"u{i}"}], "answer": "b"}
        for i in range(20)
    ]
    rows.append({"prompt": messages, "answer": "c"})
    config = write_rows(tmp_path / "rows.jsonl", rows)
    task = make_task(config, seed=0)
    found = [*asked(task, "train", 41), *asked(task, "held_out", 41)]
    by_answer = {problem.answer: problem for problem in found}
    assert by_answer["a"].raw_text.startswith("q")
    assert by_answer["a"].messages == ()
    assert by_answer["c"].messages == tuple(messages)
    assert by_answer["c"].raw_text == ""


@pytest.mark.parametrize(
    ("scorer", "answer", "completion", "score"),
    [
        ("exact", "Paris", " Paris\n", 1.0),
        ("exact", "Paris", "paris", 0.0),
        ("exact", "Paris", "", 0.0),
        ("last_integer", "7", "3 + 4 = 7", 1.0),
        ("last_integer", "7", "7 or 8", 0.0),
        ("last_integer", "8", "7 or 8", 0.0),
        ("last_integer", "1234", "1,234", 1.0),
        ("last_integer", "7", "", 0.0),
    ],
)
def test_named_scorers(scorer, answer, completion, score):
    score_of = make_scorer(JsonlTask(path="unread.jsonl", scorer=scorer), seed=0)
    assert score_of(Problem(raw_text="q", answer=answer), completion) == score


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("exactly", "is not a scorer; expected 'exact', 'last_integer' or 'file.py:function'"),
        ("{dir}/none.py:score", "No such file"),
        ("{dir}/bad.py:score", "is not valid Python"),
        ("{dir}/good.py:scores", "defines no top-level name 'scores'"),
    ],
)
def test_a_missing_scorer_is_found_at_the_start_without_running_it(tmp_path, scorer, message):
    ran = tmp_path / "ran"
    (tmp_path / "bad.py").write_text("def score(:\n")
    (tmp_path / "good.py").write_text(
        f"open({str(ran)!r}, 'w')\ntry: from math import inf as score\nexcept ImportError: pass\n"
    )
    rows = [{"prompt": f"q{i}", "answer": "a"} for i in range(40)]
    config = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        make_task(config.model_copy(update={"scorer": scorer.format(dir=tmp_path)}), seed=0)
    assert message in str(caught.value)
    make_task(config.model_copy(update={"scorer": f"{tmp_path}/good.py:score"}), seed=0)
    assert not ran.exists()


def test_a_problem_has_either_messages_or_text():
    for wrong in ({}, {"raw_text": "q", "messages": ({"role": "user", "content": "q"},)}):
        with pytest.raises(ValueError, match="either chat messages or a raw text"):
            Problem(answer="a", **wrong)


def test_tasks_and_the_pool_start_without_torch():
    script = (
        "import sys, asyncrl.tasks.scoring, asyncrl.tasks.worker\n"
        "heavy = {'torch', 'transformers', 'reasoning_gym', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_number_as_answer_is_its_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [f'{{"prompt": "question {i}", "answer": {i}}}' for i in range(40)]
    path.write_text("\n".join(rows) + "\n")
    task = make_task(JsonlTask(path=str(path), scorer="exact"), seed=0)
    problem = task.problem("train", 0)
    assert problem.answer == problem.raw_text.removeprefix("question ")
