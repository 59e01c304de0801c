"""Bad input ends in one clear sentence and exit code 2, or in a counted verdict; nothing hangs."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.models import make_tiny_model
from tests.process.runs import finish, records, start_run, write_config

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

without_vllm = pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pipeline.max_stale=1", ["pipeline.max_stale", "did you mean pipeline.max_staleness"]),
        ("pipeline.max_staleness=-1", ["pipeline.max_staleness", "-1"]),
        ("pipeline.max_staleness=1.5", ["pipeline.max_staleness", "1.5"]),
        ("pipeline.group_size=1", ["pipeline.group_size=1", "baseline"]),
        ("sampling.top_p=0.9", ["sampling.top_p=0.9", "eval.sampling"]),
        ("optimizer.learning_rate=0", ["optimizer.learning_rate"]),
        ("optimizer.max_grad_norm=0", ["optimizer.max_grad_norm"]),
        ("model.path=models/nothing-here", ["models/nothing-here", "config.json"]),
        ("broker.address=tcp://0.0.0.0:5555", ["broker.token_path"]),
        ("nonsense", ["section.key=value"]),
        ("engine.max_completion_tokens=4096", ["learner.micro_batch_tokens"]),
        pytest.param("engine.kind=vllm", ["pip install 'asyncrl[vllm]'"], marks=without_vllm),
    ],
)
def test_a_bad_setting_is_named_before_anything_starts(
    model: Path, tmp_path: Path, override: str, words: list[str]
) -> None:
    run_dir = tmp_path / "run"
    code, output = finish(start_run(write_config(tmp_path, model), run_dir, override), timeout_s=30)
    assert code == 2, output
    for word in words:
        assert word in output
    assert "Traceback" not in output
    assert not (run_dir / "run.json").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["no rows"]),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": \n', [":2:"]),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n', [":2:", "answer"]),
        ('{"prompt": "a", "answer": "b"}\n[1]\n', [":2:"]),
        ('{"prompt": "a", "answer": "\\udc80"}\n', [":1:", "answer", "surrogate"]),
    ],
)
def test_a_broken_data_file_is_named_with_its_line(
    model: Path, tmp_path: Path, content: str, words: list[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(content)
    code, output = finish(
        start_run(
            write_config(tmp_path, model), tmp_path / "run",
            "task.kind=jsonl", f'task.path="{data}"',
        ),
        timeout_s=30,
    )  # fmt: skip
    assert code == 2, output
    for word in [str(data), *words]:
        assert word in output
    assert "Traceback" not in output


SCORER = """
import time

def score(prompt, completion, answer):
    kind = int(prompt.split(":")[0]) % 5
    if kind == 1:
        raise RuntimeError("scorer broke")
    if kind == 2:
        return float("nan")
    if kind == 3 and "a" in completion:
        while True:
            pass
    if len(completion) % 3 == 0:
        raise ValueError("half \\udc80 pair \\x1b[2J")
    return float(len(completion) % 2)
"""


def test_a_scorer_that_raises_hangs_or_returns_nan_is_counted_and_nothing_is_lost(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "scorer.py").write_text(SCORER)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}:", "answer": "x"}}\n' for i in range(40)))
    run_dir = tmp_path / "run"
    code, output = finish(
        start_run(
            write_config(tmp_path, model), run_dir,
            "task.kind=jsonl", f'task.path="{data}"', f'task.scorer="{tmp_path}/scorer.py:score"',
            "scoring.deadline_s=0.5", "pipeline.num_steps=3", "pipeline.groups_per_step=2",
        )
    )  # fmt: skip
    assert code == 0, output
    rows = json.loads((run_dir / "run.json").read_text())["num_rows"]
    assert rows["train"] + rows["held_out"] == 40
    assert f"data: {rows['train']} rows to train on, {rows['held_out']} held out" in output
    steps = records(run_dir)
    assert len(steps) == 3
    assert steps[-1]["ledger/admitted"] == sum(
        steps[-1][f"ledger/{part}"]
        for part in (
            "trained",
            "dropped_stale",
            "dropped_filtered",
            "failed",
            "queued",
            "in_flight",
        )
    )
    said = set()
    # A group whose scores all failed never reaches the learner; a partly failed one trains the rest.
    for rollout in records(run_dir, "rollouts"):
        assert (rollout["score"] is None) == (rollout["verdict"] != "scored")
        if rollout["detail"].startswith("ValueError"):
            said.add(rollout["detail"])
    assert said == {"ValueError: half \\udc80 pair \u00b7[2J (scorer.py:14)"}
    assert steps[-1]["ledger/failed"] > 0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def score(text): ...", "asks for an argument 'text'"),
        (
            "def score(): ...\nimport no_such_module",
            "No module named 'no_such_module' ({scorer}:2)",
        ),
        (  # quoted, and not obeyed
            'def score(): ...\nraise ValueError("\\x1b[2J rows:100: [bold]x[/bold]")',
            "ValueError: \u00b7[2J rows:100: [bold]x[/bold] ({scorer}:2)",
        ),
    ],
)
def test_a_scorer_that_cannot_be_used_is_named_before_anything_starts(
    model: Path, tmp_path: Path, source: str, words: str
) -> None:
    scorer, run_dir = tmp_path / "scorer.py", tmp_path / "run"
    scorer.write_text(source + "\n")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}:", "answer": "x"}}\n' for i in range(40)))
    code, output = finish(
        start_run(
            write_config(tmp_path, model), run_dir,
            "task.kind=jsonl", f'task.path="{data}"', f'task.scorer="{scorer}:score"',
        )
    )  # fmt: skip
    assert code == 2, output
    assert words.format(scorer=scorer) in output
    assert len(output.splitlines()) == 1
    assert "\x1b" not in output
    assert not run_dir.exists()


def test_prompts_longer_than_the_limit_are_skipped_and_counted(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [
        f'{{"prompt": "{"x" * (60 if i % 4 == 0 else 5)}{i}:", "answer": "x"}}' for i in range(40)
    ]
    data.write_text("\n".join(rows) + "\n")
    run_dir = tmp_path / "run"
    code, output = finish(
        start_run(
            write_config(tmp_path, model), run_dir,
            "task.kind=jsonl", f'task.path="{data}"', "pipeline.num_steps=40",
        )
    )  # fmt: skip
    assert code == 0, output
    assert len(records(run_dir)) == 40
    assert len(records(run_dir, "rollouts")) == 40 * 4 * 4
    assert all("xxxxxxxxxx" not in rollout["prompt"] for rollout in records(run_dir, "rollouts"))
    # Generators report their totals four times a second, so not in the first steps already.
    assert records(run_dir)[-1]["prompts/too_long"] > 0


def test_config_prints_a_file_that_reads_back(model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model)
    command = [sys.executable, "-m", "asyncrl", "config"]
    first = subprocess.run(
        [*command, str(config), "pipeline.max_staleness=4"],
        capture_output=True,
        text=True,
        check=True,
    )
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(first.stdout)
    second = subprocess.run([*command, str(resolved)], capture_output=True, text=True, check=True)
    assert second.stdout == first.stdout
    assert "max_staleness = 4" in first.stdout
