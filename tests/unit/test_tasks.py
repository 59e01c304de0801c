"""Tasks: streams are the same everywhere, splits never meet, prompts have their form."""

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
from asyncrl.tasks import make_task
from asyncrl.tasks.scorers import numbers

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
