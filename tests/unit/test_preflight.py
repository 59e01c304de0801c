"""What a run says of its data file before it starts: how it was split, how often a row is asked."""

import ctypes
import json
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.config import RunConfig
from asyncrl.preflight import check_settings, describe_rows
from asyncrl.tasks import make_task
from tests.models import make_tiny_model

_PR_GET_CHILD_SUBREAPER = 37
"""prctl(2)."""


def config_of(folder: Path, *, num_prompts: int) -> RunConfig:
    path = folder / "rows.jsonl"
    rows = [{"prompt": f"question {i}", "answer": "a"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig.model_validate(
        {
            "model": {"path": str(make_tiny_model(folder / "model"))},
            "task": {"kind": "jsonl", "path": str(path), "held_out_fraction": 0.2},
            "eval": {"num_prompts": num_prompts},
        }
    )


def times_asked(config: RunConfig) -> Counter[str]:
    """How often an evaluation asks each held-out row: it takes the first problems of that split."""
    task = make_task(config.task, seed=config.seed)
    asked = range(config.eval.num_prompts)
    return Counter(task.problem("held_out", ordinal).raw_text for ordinal in asked)


def test_a_run_says_how_its_file_was_split_and_how_often_an_evaluation_asks_a_row(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, num_prompts=100)
    times = times_asked(config)  # more than 60: every held-out row is among them
    num_rows = check_settings(config)
    assert num_rows == {"train": 60 - len(times), "held_out": len(times)}
    split, warning = describe_rows(num_rows, config)
    assert split == (
        f"data: {num_rows['train']} rows to train on, {len(times)} held out "
        "(task.held_out_fraction=0.2)"
    )
    often = " or ".join(map(str, sorted(set(times.values()))))
    assert f"asks each held-out row {often} times (eval.num_prompts=100)" in warning
    assert f"its score is of {len(times)} rows" in warning


@pytest.mark.parametrize(
    ("num_prompts", "words"),
    [(7, None), (8, "row 1 or 2 times"), (14, "row 2 times"), (64, "row 9 or 10 times")],
)
def test_only_an_evaluation_that_repeats_rows_is_warned_of(
    tmp_path: Path, num_prompts: int, words: str | None
) -> None:
    config = config_of(tmp_path, num_prompts=num_prompts)
    _, *warnings = describe_rows({"train": 53, "held_out": 7}, config)
    assert [words in line for line in warnings if words] == ([True] if words else [])
    assert len(warnings) == (words is not None)


def test_problems_that_are_made_are_not_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_prompts=64)
    made = RunConfig.model_validate(config.model_dump() | {"task": {"kind": "repeat_letter"}})
    assert check_settings(made) == {}
    assert list(describe_rows({}, made)) == []


def test_the_check_of_a_scorer_does_not_leave_this_process_inheriting_orphans(
    tmp_path: Path,
) -> None:
    check_settings(config_of(tmp_path, num_prompts=8))
    inherits = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(inherits)) == 0
    assert inherits.value == 0
