"""Whatever the files of a run hold, there is a page and a frame of it, without a control character.

Where node is installed the page's script runs to its end, too.
"""

import io
import json
import shutil
import subprocess
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.report.page import write_report
from asyncrl.report.watch import watch
from tests.unit.run_folders import make_run, rollout_record, step_record
from tests.unit.test_jsonlines import DEEP, START, VALUES

NODE = shutil.which("node")
DOM = Path(__file__).with_name("page_dom.js")
ESC = "\x1b[31mred\x07"
EVAL = {"version": 0, "mean_score": 0.5, "num_samples": 8, "num_unscored": 0, "seconds": 0.5}
DROP = {
    "group_id": 9, "ordinal": 9, "attempt": 0, "version": 3, "reason": "zero_signal",
    "again": False, "generator": "generator-0", "scores": [1.0, 1.0],
}  # fmt: skip
ROLLOUT = rollout_record(3, 7, 0, tokens={"text": ["a"], "behaviour_logprobs": [-1.0]})
ERROR = {"type": "DeviceError", "message": "gone", "time_s": 1.0}
LINES = (
    b"{}", b"null", b"[]", DEEP, b"\x00\x1b\xff", b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}",
)  # fmt: skip
WHOLE = {
    "metrics.jsonl": step_record(4, new_alerts=["a: b"], alerts=["a"]),
    "evals.jsonl": EVAL,
    "rollouts.jsonl": ROLLOUT,
    "drops.jsonl": DROP | {"payload": ["AAAA"]},
    "restarts.jsonl": {"process": "generator-0", "cause": "killed by SIGKILL", "time": "noon"},
    "trace/learner.jsonl": START | {"ts": 0, "dur": 0},
    "errors/learner.json": ERROR,
    "run.json": {"run_id": "r", "gpu_split": {"learner": 1, "generators": 1}},
    "summary.json": {"outcome": "done", "failure": "f"},
}


def write(run_dir, name, lines):
    path = run_dir / name
    path.parent.mkdir(exist_ok=True)
    if name.endswith(".json"):
        path.write_bytes(lines[-1])
    else:
        before = path.read_bytes() if path.exists() else b""
        path.write_bytes(before + b"".join(line + b"\n" for line in lines))


def shown(run_dir):
    """Page and frame, which have only characters that are shown, and line ends."""
    screen = Console(file=io.StringIO(), width=140, force_terminal=False, highlight=False)
    watch(run_dir, once=True, console=screen)
    write_report(run_dir, run_dir / "page.html")
    page, frame = (run_dir / "page.html").read_text(), screen.file.getvalue()
    controls = {c for c in page + frame if unicodedata.category(c) == "Cc"}
    assert controls <= {"\n"}
    assert not any(unicodedata.category(c)[0] == "C" for c in frame.replace("\n", ""))
    if NODE is not None:
        done = subprocess.run(
            [NODE, DOM, run_dir / "page.html"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return page, frame


def changes(record):
    """The record with some fields replaced, or beside others of any name."""
    names = st.sampled_from(sorted(record)) | st.sampled_from(
        [
            "share/learner@wait_batch",
            "share/generator@\x1b[2J",
            "staleness/tokens@1",
            "mismatch/k3@1",
        ]
    )
    return st.dictionaries(names | st.text(max_size=4), VALUES, max_size=4).map(
        lambda some: json.dumps(record | some).encode()
    )


contents = st.fixed_dictionaries(
    {},
    optional={
        name: st.lists(changes(record) | st.binary(max_size=12), min_size=1, max_size=3)
        for name, record in WHOLE.items()
    },
)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(contents)
def test_any_value_in_any_field_and_any_bytes_in_any_file_are_shown(tmp_path_factory, files):
    run_dir = make_run(tmp_path_factory.mktemp("run") / ESC)
    for name, lines in files.items():
        write(run_dir, name, lines)
    shown(run_dir)


@pytest.mark.parametrize("name", [name for name in WHOLE if name.endswith(".jsonl")])
def test_lines_of_another_form_are_passed_over(tmp_path, name):
    run_dir = make_run(tmp_path / "run")
    write(run_dir, name, LINES)
    shown(run_dir)


@pytest.mark.parametrize("name", [name for name in WHOLE if name.endswith(".json")])
@pytest.mark.parametrize("line", LINES)
def test_a_file_of_another_form_is_passed_over(tmp_path, name, line):
    run_dir = make_run(tmp_path / "run")
    write(run_dir, name, [line])
    shown(run_dir)


@pytest.mark.parametrize("name", [*WHOLE, "config.toml", "errors", "trace"])
def test_a_folder_or_a_file_in_the_place_of_the_other_is_passed_over(tmp_path, name):
    run_dir = make_run(tmp_path / "run")
    path = run_dir / name
    path.unlink(missing_ok=True)
    if name in ("errors", "trace"):
        path.write_text("a file")
    else:
        path.mkdir(parents=True)
    shown(run_dir)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("metrics.jsonl", '"new_alerts": null'), ("metrics.jsonl", '"alerts": null'),
        ("metrics.jsonl", '"staleness/tokens@1": NaN'), ("metrics.jsonl", '"reward/mean": 1e999'),
        ("metrics.jsonl", '"share/learner@wait_batch": 1e60'), ("metrics.jsonl", '"step": [1]'),
        ("metrics.jsonl", f'"loss/policy": 1{"0" * 400}'), ("metrics.jsonl", '"step": 1e999'),
        ("metrics.jsonl", '"share/learner@\\u001b[2J": 0.9'), ("metrics.jsonl", '"alerts": [[]]'),
        ("metrics.jsonl", f'"staleness/tokens@{"9" * 5000}": 1.0'), ("evals.jsonl", '"version": {}'),
        ("rollouts.jsonl", '"version_spans": null'), ("rollouts.jsonl", '"version_spans": [[]]'),
        ("rollouts.jsonl", '"tokens": {"text": null}'), ("rollouts.jsonl", '"group_id": []'),
        ("drops.jsonl", '"payload": ["\\u00e9"]'), ("drops.jsonl", '"reason": "\\u001b[2J"'),
        ("run.json", '"gpu_split": {"learner": "a", "generators": []}'), ("run.json", '"a": 1e999'),
        ("summary.json", '"outcome": "failed", "failure": ["\\u001b[2J"]'),
        ("trace/learner.jsonl", '"args": null'), ("trace/learner.jsonl", '"ts": 1e999'),
        ("errors/learner.json", '"type": null'), ("errors/learner.json", '"time_s": "now"'),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_is_passed_over(tmp_path, name, fields):
    run_dir = make_run(tmp_path / "run")
    if name == "errors/learner.json":
        (run_dir / "summary.json").unlink()  # which would know better
    write(run_dir, name, [json.dumps(WHOLE[name])[:-1].encode() + f", {fields}}}".encode()])
    shown(run_dir)


@pytest.mark.parametrize(
    "text",
    [
        'name = "\\u001b[2J\\u0000"\n[pipeline]\nmax_staleness = "\\u001b[31m"\nnum_steps = "4"',
        "name = inf\n[optimizer]\nlearning_rate = nan\n[pipeline]\nnum_steps = -3",
        f"seed = 1{'0' * 500}\n[pipeline]\nnum_steps = 1{'0' * 500}\nmax_staleness = [[1]]",
        "name = 1979-05-27\nseed = 07:32:00\npipeline = 3",
        f"name = {DEEP.decode()}",
    ],
)
def test_a_configuration_of_another_form_is_shown(tmp_path, text):
    run_dir = make_run(tmp_path / "run")
    (run_dir / "config.toml").write_text(text)
    shown(run_dir)


def test_ids_and_names_are_not_markup(tmp_path):
    run_dir = make_run(tmp_path / "run")
    (run_dir / "config.toml").write_text(
        'name = "[bold]n[/bold]"\n[pipeline]\nmax_staleness = "[u]k"'
    )
    write(
        run_dir,
        "metrics.jsonl",
        [json.dumps(step_record(4, **{"share/learner@[i]c": 0.9})).encode()],
    )
    write(run_dir, "drops.jsonl", [json.dumps(DROP | {"reason": "[b]r"}).encode()])
    _, frame = shown(run_dir)
    for name in ("[bold]n[/bold]", "[u]k", "[i]c", "[b]r"):
        assert name in frame
