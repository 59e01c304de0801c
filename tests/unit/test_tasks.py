"""Tasks: streams are deterministic, splits never meet, and no score can be had for nothing."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import (
    JsonlTask,
    ProductsTask,
    ReasoningGymTask,
    RepeatLetterTask,
    ReverseDigitsTask,
)
from asyncrl.errors import ConfigError
from asyncrl.tasks import make_scorer, make_task
from asyncrl.tasks.base import Problem
from asyncrl.tasks.scorers import last_number, numbers

needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="extra gym")

ROOT = Path(__file__).resolve().parents[2]

SYNTHETIC = [
    ReverseDigitsTask(num_digits=2, num_examples=0),
    ReverseDigitsTask(num_digits=3, num_examples=8),
    ProductsTask(num_digits=1),
    ProductsTask(num_digits=6),
    RepeatLetterTask(num_letters=4),
]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlTask(path=str(path), held_out_fraction=0.3)


def asked(task, split, count):
    return [task.problem(split, ordinal) for ordinal in range(count)]


# --- splits -------------------------------------------------------------------------------------


def test_one_digit_products_are_split_whole_and_swapped_operands_stay_together():
    task = make_task(ProductsTask(num_digits=1), seed=0)
    pairs = {
        split: {frozenset(numbers(problem.question)) for problem in asked(task, split, 1500)}
        for split in ("train", "held_out")
    }
    # Operands 2..9, order aside: 8 * 9 / 2 = 36 problems.
    everything = {frozenset({str(a), str(b)}) for a in range(2, 10) for b in range(2, 10)}
    assert len(everything) == 36
    assert pairs["train"]
    assert pairs["held_out"]
    assert pairs["train"].isdisjoint(pairs["held_out"])
    assert pairs["train"] | pairs["held_out"] == everything


@pytest.mark.parametrize("num_examples", [0, 8])
def test_two_digit_reversals_are_split_whole_without_examples_and_palindromes(num_examples):
    task = make_task(ReverseDigitsTask(num_digits=2, num_examples=num_examples), seed=0)
    shown_by = make_task(ReverseDigitsTask(num_digits=2, num_examples=8), seed=5)
    shown = {
        m["content"] for m in shown_by.problem("train", 0).messages[:-1] if m["role"] == "user"
    }
    assert len(shown) == 8
    train, held_out = (
        {problem.question for problem in asked(task, split, 1500)}
        for split in ("train", "held_out")
    )
    everything = {f"Reverse this list: {a} {b}" for a in range(10) for b in range(10) if a != b}
    assert train
    assert held_out
    assert train.isdisjoint(held_out)
    assert train | held_out == everything - shown


@pytest.mark.parametrize("num_letters", [2, 3, 26])
def test_repeat_letter_splits_are_disjoint_and_neither_is_empty(num_letters):
    task = make_task(RepeatLetterTask(num_letters=num_letters), seed=0)
    train, held_out = (
        {problem.raw_text for problem in asked(task, split, 1500)}
        for split in ("train", "held_out")
    )
    assert train
    assert held_out
    assert train.isdisjoint(held_out)
    assert len(train | held_out) == 8 * num_letters  # 1 to 8 repeats of each letter


@given(seed=st.integers(0, 2**63 - 1), other=st.integers(0, 2**63 - 1))
def test_no_seed_trains_on_what_another_holds_out(seed, other):
    held_out = {p.question for p in asked(make_task(SYNTHETIC[1], seed=seed), "held_out", 8)}
    assert held_out.isdisjoint(
        p.question for p in asked(make_task(SYNTHETIC[1], seed=other), "train", 8)
    )


@needs_gym
def test_reasoning_gym_splits_share_no_question():
    config = ReasoningGymTask(dataset="chain_sum", params={"max_terms": 2, "max_digits": 1})
    task = make_task(config, seed=3)
    train, held_out = (
        {problem.question for problem in asked(task, split, 300)} for split in ("train", "held_out")
    )
    assert train
    assert held_out
    assert train.isdisjoint(held_out)


@needs_gym
def test_a_gym_data_set_too_small_for_two_splits_is_refused():
    task = make_task(ReasoningGymTask(dataset="chain_sum", params={"size": 1}), seed=0)
    with pytest.raises(ConfigError, match=r"split of this task is empty"):
        asked(task, "train", 1), asked(task, "held_out", 1)


def test_jsonl_rows_that_share_a_prompt_share_a_split(tmp_path):
    rows = [{"prompt": f"q{i % 40}", "answer": f"a{i}"} for i in range(120)]
    task = make_task(write_rows(tmp_path / "rows.jsonl", rows), seed=0)
    train = {problem.raw_text for problem in asked(task, "train", 120)}
    held_out = {problem.raw_text for problem in asked(task, "held_out", 120)}
    assert train.isdisjoint(held_out)
    assert len(train | held_out) == 40


# --- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", SYNTHETIC, ids=lambda config: config.kind)
def test_streams_are_the_same_in_every_process_and_differ_by_seed(config):
    task = make_task(config, seed=7)
    mine = [repr(task.problem(split, n)) for split in ("train", "held_out") for n in (0, 1, 10**12)]
    script = (
        "import sys, json; from pydantic import TypeAdapter\n"
        "from asyncrl.config import TaskConfig; from asyncrl.tasks import make_task\n"
        "task = make_task(TypeAdapter(TaskConfig).validate_json(sys.argv[1]), seed=7)\n"
        "print(json.dumps([repr(task.problem(s, n)) for s in ('train', 'held_out') "
        "for n in (10**12, 1, 0)]))"
    )
    command = [sys.executable, "-c", script, config.model_dump_json()]
    theirs = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    assert theirs == mine[2::-1] + mine[:2:-1]  # asked in another order, by another process
    other = make_task(config, seed=8)
    assert asked(other, "train", 20) != asked(task, "train", 20)


@needs_gym
def test_gym_items_are_the_same_whoever_makes_them():
    config = ReasoningGymTask(dataset="letter_counting")
    one, two = make_task(config, seed=11), make_task(config, seed=11)
    assert asked(one, "train", 10) == asked(two, "train", 10)
    assert asked(one, "train", 10) != asked(make_task(config, seed=12), "train", 10)


def test_every_epoch_of_a_file_has_all_rows_in_a_new_order(tmp_path):
    rows = [{"prompt": f"q{i}", "answer": "a"} for i in range(30)]
    config = write_rows(tmp_path / "rows.jsonl", rows)
    task = make_task(config, seed=1)
    size = len({problem.raw_text for problem in asked(task, "train", 200)})
    epochs = [
        [task.problem("train", epoch * size + i).raw_text for i in range(size)]
        for epoch in range(4)
    ]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert task.problem("train", 0).raw_text == epochs[0][0]  # going back is the same stream
    assert asked(make_task(config, seed=2), "train", size) != asked(task, "train", size)


# --- prompts ------------------------------------------------------------------------------------


def test_reverse_digits_shows_solved_turns_and_asks_in_the_same_form():
    task = make_task(ReverseDigitsTask(num_digits=3, num_examples=2), seed=0)
    problem = task.problem("train", 4)
    assert [m["role"] for m in problem.messages] == ["user", "assistant"] * 2 + ["user"]
    for question, reply in zip(problem.messages[:-1:2], problem.messages[1::2], strict=True):
        digits = question["content"].removeprefix("Reverse this list: ").split(" ")
        assert reply["content"] == " ".join(digits[::-1])
    digits = problem.question.removeprefix("Reverse this list: ").split(" ")
    assert len(digits) == 3
    assert problem.answer.split(" ") == digits[::-1]
    assert (
        problem.messages[:-1]
        == make_task(ReverseDigitsTask(num_digits=3, num_examples=2), seed=99)
        .problem("held_out", 0)
        .messages[:-1]
    )


def test_products_ask_for_a_product_of_two_numbers_of_the_right_size():
    task = make_task(ProductsTask(num_digits=3), seed=0)
    for problem in asked(task, "train", 50):
        a, b = map(int, numbers(problem.question))
        assert 100 <= a <= 999
        assert 100 <= b <= 999
        assert problem.question == f"What is {a} times {b}? Answer with just the number."
        assert problem.answer == str(a * b)


# --- scores -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", SYNTHETIC, ids=lambda config: config.kind)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_gold_scores_one_and_nothing_or_code_or_an_echo_scores_zero(config, split):
    task = make_task(config, seed=0)
    for problem in asked(task, split, 200):
        assert task.score(problem, problem.answer) == 1.0
        for text in ("", " \n", "None", "nan", "__import__('os')._exit(3)"):
            if config.kind != "repeat_letter":
                assert task.score(problem, text) == 0.0
        if config.kind != "repeat_letter":
            assert task.score(problem, problem.question) == 0.0


ASKED_140 = Problem(
    messages=({"role": "user", "content": "Reverse this list: 1 4 0"},), answer="0 4 1"
)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("0 4 1", 1.0),
        (" 0, 4, 1.\n", 1.0),
        ("041", 1.0),
        ("The reversed list is 0 4 1", 1.0),
        ("0 4 1 or 1 4 0", 0.0),
        ("0 4 1 0", 0.0),
        ("0 4 1\n\n2", 0.0),
        ("0 4", 0.0),
        ("0-4-1", 0.0),
        ("1 4 0", 0.0),
        ("0 4 1. There are 3 digits", 0.0),
    ],
)
def test_reverse_digits_wants_one_run_of_digits(completion, score):
    assert make_task(ReverseDigitsTask(), seed=0).score(ASKED_140, completion) == score


ASKED_7_8 = Problem(
    messages=({"role": "user", "content": "What is 7 times 8? Answer with just the number."},),
    answer="56",
)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("56", 1.0),
        ("56.", 1.0),
        ("7 times 8 is 56", 1.0),
        ("7 x 8 = 56", 1.0),
        ("56 is 7 times 8", 0.0),  # the last number counts
        ("54 or 56", 0.0),
        ("56 or 54", 0.0),
        ("54. No: 56", 0.0),
        ("7 8 56", 0.0),  # a list of candidates
        ("-56", 0.0),
        ("56.5", 0.0),
        ("156", 0.0),
        ("1 2 3 4 5 6 56", 0.0),
    ],
)
def test_products_accept_one_candidate_only(completion, score):
    assert make_task(ProductsTask(), seed=0).score(ASKED_7_8, completion) == score


@pytest.mark.parametrize(
    ("completion", "score"), [("", 0.0), ("bbbb", 1.0), ("babc", 0.5), ("B", 0.0), ("bb\n ", 0.5)]
)
def test_repeat_letter_scores_the_share_of_the_letter(completion, score):
    problem = Problem(raw_text="bb:", answer="b")
    assert make_task(RepeatLetterTask(), seed=0).score(problem, completion) == score


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("the answer is 7", "7"),
        ("the answer is 7 or 8", None),
        ("7, 8", None),
        ("(7) / (8)", None),
        ("7 and 7", "7"),
        ("48/2 = 24, and 24+48 = 72", "72"),
        ("$1,234.00$", "1234"),
        ("12,34", None),
        ("007", "7"),
        ("-5", "-5"),
        ("3-5", "5"),
        ("x-5", "5"),
        ("1,2345", None),
        ("-0", "0"),
        ("", None),
        ("\u0663", None),
    ],
)
def test_last_number_is_none_unless_one_candidate_is_named(text, last):
    assert last_number(text) == last


@given(st.integers(-(10**30), 10**30))
def test_last_number_reads_back_any_integer_with_and_without_commas(value):
    assert last_number(f"so it is {value}.") == str(value)
    assert last_number(f"so it is {value:,}.") == str(value)


@given(st.text(alphabet="0123456789 ,.-or", max_size=60))
def test_scoring_any_text_never_raises(text):
    for config in (ReverseDigitsTask(), ProductsTask(), RepeatLetterTask()):
        task = make_task(config, seed=0)
        assert 0.0 <= task.score(task.problem("train", 0), text) <= 1.0


def test_long_runs_of_digits_spaces_and_brackets_are_scored_at_once():
    n = 10**5  # quadratic scanning, 1e10 steps, would run into the time-out of the test
    for text in ("9" * n, "1" + " " * n, "(" * n, "1," * n, "1 or " * n):
        for config, problem in ((ReverseDigitsTask(), ASKED_140), (ProductsTask(), ASKED_7_8)):
            assert make_task(config, seed=0).score(problem, text) == 0.0


# --- reasoning-gym ------------------------------------------------------------------------------


@needs_gym
@pytest.mark.parametrize(
    "dataset", ["chain_sum", "letter_counting", "count_bits", "gcd", "game_of_life_halting"]
)
def test_gym_gold_scores_one_and_empty_echo_and_lists_score_zero(dataset):
    task = make_task(ReasoningGymTask(dataset=dataset), seed=0)
    for problem in asked(task, "train", 4):
        assert task.score(problem, problem.answer) == 1.0
        assert task.score(problem, f"I think\n<answer> {problem.answer} </answer> done") == 1.0
        assert task.score(problem, "") == 0.0
        assert task.score(problem, "<answer></answer>") == 0.0
        assert task.score(problem, problem.question) == 0.0
        if dataset != "game_of_life_halting":  # its package's scorer takes any word as yes or no
            assert task.score(problem, f"the answer is {problem.answer} or 123456") == 0.0


@needs_gym
def test_gym_partial_credit_is_kept_only_when_asked_for():
    text = "the answer is 7"
    for min_score, expected in ((0.0, 1 / 15), (0.99, 0.0), (0.05, 1.0)):  # 1 of 15 characters
        config = ReasoningGymTask(
            dataset="chain_sum", params={"max_terms": 2, "max_digits": 1}, min_score=min_score
        )
        task = make_task(config, seed=0)
        problem = next(p for p in asked(task, "train", 400) if p.answer == "7")
        assert task.score(problem, text) == pytest.approx(expected)


@needs_gym
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ReasoningGymTask(dataset="chain_sums"),
            "task.dataset='chain_sums' is not in reasoning-gym",
        ),
        (ReasoningGymTask(dataset="chain_sum", params={"terms": 2}), "terms"),
        (ReasoningGymTask(dataset="chain_sum", params={"min_terms": 0}), "min_terms"),
        (ReasoningGymTask(dataset="word_ladder"), "task.params.size=100000"),
    ],
)
def test_gym_settings_that_do_not_fit_are_named(config, message):
    with pytest.raises(ConfigError) as caught:
        make_task(config, seed=0)
    assert message in str(caught.value)


def test_a_missing_gym_names_the_extra():
    script = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from asyncrl.config import ReasoningGymTask; from asyncrl.tasks import make_task\n"
        "make_task(ReasoningGymTask(dataset='chain_sum'), seed=0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "ConfigError" in done.stderr
    assert "pip install asyncrl[gym]" in done.stderr


# --- jsonl --------------------------------------------------------------------------------------

GOOD = '{"prompt": "q", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ("\n \n", "holds no rows"),
        (GOOD + "{broken\n", ":2: not a line of JSON"),
        (GOOD + "[1]\n", ":2: expected an object, got list"),
        (GOOD + "\n" + '{"prompt": "q"}\n', ":3: the key 'answer' is missing"),
        ('{"answer": "a"}\n', ":1: the key 'prompt' is missing"),
        ('{"prompt": "q", "answer": 3}\n', ":1: answer must be text, got int"),
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
