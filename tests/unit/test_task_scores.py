"""Scores of the built-in tasks: gold earns one, and nothing else is to be had for nothing."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import (
    ProductsTask,
    ReasoningGymTask,
    RepeatLetterTask,
    ReverseDigitsTask,
)
from asyncrl.errors import ConfigError
from asyncrl.tasks import make_task
from asyncrl.tasks.base import Problem
from asyncrl.tasks.scorers import last_number

needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="extra gym")

ROOT = Path(__file__).resolve().parents[2]

SYNTHETIC = [
    ReverseDigitsTask(num_digits=2, num_examples=0),
    ReverseDigitsTask(num_digits=3, num_examples=8),
    ProductsTask(num_digits=1),
    ProductsTask(num_digits=6),
    RepeatLetterTask(num_letters=4),
]


def asked(task, split, count):
    return [task.problem(split, ordinal) for ordinal in range(count)]


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
