"""The report's data: whole, patient with half-written files, honest about what is missing."""

import base64
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.cli import main
from asyncrl.errors import ConfigError
from asyncrl.report.data import collect, columns
from asyncrl.report.page import write_report
from asyncrl.report.rollouts import GROUP, ROW, evenly
from asyncrl.report.verdict import read_verdict
from asyncrl.run_folder import begin_attempt, run_folder
from asyncrl.wire.codec import encode_group
from tests.reference.groups import group, rollout
from tests.unit.run_folders import make_run, rollout_record, step_record, write_lines


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "run")


def shown(data):
    """Rollouts of the page as dicts, each with its group's facts."""
    groups = [dict(zip(GROUP, values, strict=True)) for values in data["rollouts"]["groups"]]
    rows = [dict(zip(ROW, values, strict=True)) for values in data["rollouts"]["rows"]]
    return [groups[row["group"]] | row for row in rows]


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_the_data_are_what_the_records_say(run_dir):
    data = collect(run_dir)
    assert data["steps"]["step"] == [0, 1, 2, 3]
    assert data["steps"]["reward/mean"] == [0, 0.01, 0.02, 0.03]
    assert data["steps"]["mismatch/k3@2"] == [0.25] * 4
    assert [e["version"] for e in data["evals"]] == [0, 4]
    assert (data["run"]["name"], data["run"]["state"]) == ("made", "done")
    assert ["k", 2] in data["run"]["short"]
    assert data["run"]["provenance"]["run_id"] == "abc"
    found = shown(data)
    assert len(found) == data["rollouts"]["num_found"] == 16  # 4 steps of 2 groups of 2
    last = found[-1]
    assert (last["step"], last["id"], last["prompt"], last["text"]) == (
        3, 7, "prompt 7", "completion 1",
    )  # fmt: skip
    assert (last["spans"], last["advantage"], last["tokens"]) == ([[1, 0, 1], [2, 1, 2]], 1.0, 0)


def test_a_metric_that_only_some_steps_have_is_null_elsewhere():
    records = [{"step": 0, "a": 1.0}, {"step": 1, "b": float("nan")}, {"step": 2, "a": 0.123456789}]
    assert columns(records) == {"step": [0, 1, 2], "a": [1, None, 0.123457]}


def test_numbers_that_json_does_not_have_are_none(run_dir):
    append(run_dir / "evals.jsonl", '{"version": 9, "mean_score": NaN, "seconds": -Infinity}\n')
    write_lines(run_dir / "drops.jsonl", [{"scores": [float("nan"), 1.0], "version": 0}])
    data = write_report(run_dir, run_dir / "page.html")
    assert data["evals"][-1] == {"version": 9, "mean_score": None, "seconds": None}
    assert data["drops"][0]["scores"] == [None, 1.0]


@pytest.mark.parametrize("name", ["metrics", "rollouts", "evals", "drops"])
@pytest.mark.parametrize("cut", ['{"step": 9, "rew', "{", '{"step": 9, "text": "é', "\x00\x00"])
def test_a_line_that_is_being_written_changes_nothing(run_dir, name, cut):
    before = collect(run_dir)
    with (run_dir / f"{name}.jsonl").open("ab") as file:
        file.write(cut.encode()[:-1] if cut.endswith("é") else cut.encode())
    after = collect(run_dir)
    del before["run"]["written"], after["run"]["written"]
    assert after == before


def test_a_line_that_a_full_disk_cut_costs_only_itself(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:40] + "\n", '"text"\n', "[1]\n", *lines[2:]]))
    assert collect(run_dir)["steps"]["step"] == [0, 2, 3]


def test_of_a_step_that_was_made_twice_the_second_counts(run_dir):
    append(run_dir / "metrics.jsonl", json.dumps(step_record(2, **{"reward/mean": 0.75})) + "\n")
    data = collect(run_dir)
    assert data["steps"]["step"] == [0, 1, 2, 3]
    assert data["steps"]["reward/mean"][2] == 0.75


def test_a_run_that_just_began_has_a_page(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    data = write_report(run_dir, tmp_path / "page.html")
    assert data["steps"] == {}
    assert data["rollouts"]["rows"] == []


def test_a_folder_that_holds_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"neither run.json nor .*metrics.jsonl"):
        write_report(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_without_a_trace_the_times_are_those_of_the_records(run_dir):
    data = collect(run_dir)
    assert data["causes"]["strips"] == {}
    assert data["causes"]["exact"] == [False] * 4
    # Half of a second of waiting, half of forward.
    assert data["causes"]["by_step"][0] == {
        "learner": {"wait_batch": 0.5, "forward": 0.5}, "generator": {"decode": 1.0},
    }  # fmt: skip
    seconds, usual, slow, text = data["notes"]["times"][1]
    assert (seconds, usual, slow) == (1.0, 1.0, False)
    assert "generation is the bottleneck" in text


def test_of_too_many_rollouts_whole_groups_are_left_out_evenly(tmp_path):
    run_dir = make_run(tmp_path / "run", steps=100, groups=1, size=4)
    size = (run_dir / "rollouts.jsonl").stat().st_size
    data = collect(run_dir, budget_bytes=size // 10)
    assert data["rollouts"]["num_found"] == 400
    steps = [row["step"] for row in shown(data)]
    assert 9 <= len(set(steps)) <= 10  # a tenth of 100 groups
    assert all(steps.count(step) == 4 for step in set(steps))
    gaps = [b - a for a, b in zip(sorted(set(steps))[:-1], sorted(set(steps))[1:], strict=True)]
    assert set(gaps) <= {10, 11}


def drop_record(group_id, *, version=0, length=2, **values):
    """A group of two completions that was dropped with its payload, as broker/drops.py writes it."""
    dropped = group(
        [1, 2],
        [rollout([5] * length, score=1.0), rollout([7] * length, score=1.0)],
        group_id=group_id,
    )
    frames = [base64.b64encode(frame).decode() for frame in encode_group(dropped)]
    return {
        "group_id": group_id, "ordinal": group_id, "attempt": 0, "version": version,
        "reason": "zero_signal", "again": False, "generator": "generator-0", "scores": [1.0, 1.0],
        "payload": frames,
    } | values  # fmt: skip


def test_the_budget_is_shared_by_trained_and_dropped_groups(tmp_path):
    run_dir = make_run(tmp_path / "run", steps=40, groups=1, size=4)
    drops = [drop_record(100 + i, version=i // 3, length=40) for i in range(120)]
    write_lines(run_dir / "drops.jsonl", drops)
    total = sum((run_dir / f"{name}.jsonl").stat().st_size for name in ("rollouts", "drops"))
    everything = collect(run_dir, budget_bytes=total)["rollouts"]
    assert (len(everything["groups"]), everything["left_out"]) == (160, {})
    assert everything["num_found"] == 40 * 4 + 120 * 2

    data = collect(run_dir, budget_bytes=total // 8)
    trained = {row["id"] for row in shown(data) if row["fate"] == "trained"}
    dropped = {row["id"] for row in shown(data)} - trained
    # An eighth of the 40 and of the 120, and 2 fewer at most for what single groups take more.
    assert 3 <= len(trained) <= 5
    assert 13 <= len(dropped) <= 15
    assert len(shown(data)) == 4 * len(trained) + 2 * len(dropped)  # whole groups
    assert data["rollouts"]["left_out"] == {
        "rollouts.jsonl": 4 * (40 - len(trained)), "drops.jsonl": 2 * (120 - len(dropped)),
    }  # fmt: skip
    assert data["rollouts"]["num_found"] == everything["num_found"]
    assert len(data["drops"]) == 120  # why each was dropped is on the page in any case


def test_a_budget_of_nothing_shows_no_rollout(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run")
    write_lines(run_dir / "drops.jsonl", [drop_record(40)])
    with pytest.raises(SystemExit) as end:
        main(["report", str(run_dir), "--max-mb", "0"])
    assert end.value.code == 0
    assert "4 steps, 0 of 18 rollouts" in capsys.readouterr().out  # 4 x 2 x 2 and a group of two


@given(st.lists(st.integers(1, 10**6), max_size=50), st.integers(0, 10**7))
def test_what_is_shown_fits_the_budget_and_everything_is_if_it_fits(sizes, budget):
    chosen = evenly(sizes, budget)
    assert sum(size for size, is_shown in zip(sizes, chosen, strict=True) if is_shown) <= budget
    assert all(chosen) or sum(sizes) > budget


def test_groups_larger_than_the_others_do_not_break_the_budget():
    # Every 8th group is 50 times as large, and so is every one that an even choice of 1/8 would take.
    sizes = [1, 1, 1, 1, 1, 1, 1, 50] * 20
    budget = sum(sizes) // 8
    chosen = [size for size, is_shown in zip(sizes, evenly(sizes, budget), strict=True) if is_shown]
    assert 0 < sum(chosen) <= budget


def test_a_line_that_is_no_rollout_does_not_split_a_group(run_dir):
    records = [rollout_record(0, 0, 0), {}, {"step": 0}, rollout_record(0, 0, 1)]
    write_lines(run_dir / "rollouts.jsonl", records)
    data = collect(run_dir)
    assert [(row["group"], row["index"]) for row in shown(data)] == [(0, 0), (0, 1)]


def test_a_dropped_group_is_shown_with_its_text_and_reason(run_dir):
    dropped = group([1, 2], [rollout([5, 6], score=1.0), rollout([7], score=1.0)], group_id=40)
    frames = [base64.b64encode(frame).decode() for frame in encode_group(dropped)]
    kept = drop_record(40, version=2, payload=frames)
    spoilt = kept | {"group_id": 41, "payload": ["????"]}
    foreign = kept | {"group_id": 42, "payload": [base64.b64encode(b"{}").decode()] * 4}
    write_lines(run_dir / "drops.jsonl", [kept, spoilt, foreign])
    data = collect(run_dir)
    assert [drop["group_id"] for drop in data["drops"]] == [40, 41, 42]
    assert not any("payload" in drop for drop in data["drops"])
    found = [row for row in shown(data) if row["fate"] == "dropped: zero_signal"]
    assert [(row["id"], row["step"], row["num_tokens"], row["score"]) for row in found] == [
        (40, 2, 2, 1.0), (40, 2, 1, 1.0),
    ]  # fmt: skip
    assert data["rollouts"]["num_found"] == 18  # 16 trained ones and these


def test_every_token_of_a_detailed_rollout_is_there(run_dir):
    tokens = {
        "text": ["a", "b"], "behaviour_logprobs": [-0.5, -1.0],
        "proximal_logprobs": [-0.4, None], "behaviour_weights": [1.1, None],
    }  # fmt: skip
    write_lines(run_dir / "rollouts.jsonl", [rollout_record(0, 0, 0, tokens=tokens)])
    [row] = shown(collect(run_dir))
    assert row["tokens"] == [["a", "b"], [-0.5, -1.0], [-0.4, None], [1.1, None]]


def test_how_a_run_ended_is_read_from_what_it_left(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "run")
    assert read_verdict(run_dir).state == "done"
    summary = run_dir / "summary.json"
    summary.write_text('{"outcome": "interrupted"}')
    assert read_verdict(run_dir).state == "interrupted"
    assert "nothing was saved yet" in read_verdict(run_dir).text
    (run_dir / "checkpoints/version-000050").mkdir(parents=True)
    assert read_verdict(run_dir).text.endswith("(Ctrl-C or a signal) and can be resumed")
    (run_dir / "errors").mkdir()
    error = {"type": "PeerLostError", "message": "the broker is gone", "time_s": 1.0}
    (run_dir / "errors" / "learner.json").write_text(json.dumps(error))
    error = {"type": "NoProgressError", "message": "nothing came", "time_s": 2.0}
    (run_dir / "errors" / "broker.json").write_text(json.dumps(error))
    summary.write_text('{"outcome": "failed"}')
    verdict = read_verdict(run_dir)
    assert verdict.state == "failed"
    assert "broker: NoProgressError: nothing came" in verdict.text  # the cause, not its messenger
    # The supervisor knows more: of a killed process nobody else leaves a word.
    summary.write_text('{"outcome": "failed", "failure": "learner: killed by SIGKILL"}')
    assert read_verdict(run_dir).text == "learner: killed by SIGKILL"
    assert read_verdict(tmp_path).state == "empty"


def test_a_finished_run_is_that_whatever_the_times_of_its_files_are(tmp_path):
    run_dir = make_run(tmp_path / "run")
    ended_s = (run_dir / "summary.json").stat().st_mtime
    os.utime(run_dir / "run.json", (ended_s + 10, ended_s + 10))  # as a copy may leave them
    assert read_verdict(run_dir).state == "done"


def test_how_an_earlier_attempt_ended_is_not_the_verdict_on_the_one_that_began_after_it(tmp_path):
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").write_text('{"outcome": "failed"}')
    (run_dir / "errors").mkdir()
    error = {"type": "NoProgressError", "message": "nothing came", "time_s": 2.0}
    (run_dir / "errors" / "broker.json").write_text(json.dumps(error))
    assert read_verdict(run_dir).state == "failed"
    assert begin_attempt(run_dir, {"run_id": "new", "seed": 7}) == "abc"
    assert read_verdict(run_dir).state == "running"
    for path in run_dir.glob("*.json*"):  # killed, and nothing was written since an hour
        os.utime(path, (path.stat().st_mtime - 3600,) * 2)
    assert read_verdict(run_dir).state == "killed"
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["run_id"], record["earlier"]["commit"]) == ("abc", "0" * 40)


def test_a_run_is_going_on_for_as_long_as_its_supervisor_holds_the_folder(tmp_path):
    from asyncrl.config import RunConfig

    run_dir = tmp_path / "run"
    config = RunConfig.model_validate(
        {"model": {"path": "x"}, "task": {"kind": "repeat_letter"}, "run_dir": str(run_dir)}
    )
    with run_folder(config):
        make_run(run_dir)
        assert read_verdict(run_dir).state == "running"
    assert read_verdict(run_dir).state == "done"


def test_the_command_writes_the_page_and_says_what_is_in_it(run_dir, capsys):
    with pytest.raises(SystemExit) as end:
        main(["report", str(run_dir)])
    assert end.value.code == 0
    assert "4 steps, 16 of 16 rollouts" in capsys.readouterr().out
    assert (run_dir / "report.html").stat().st_size > 10_000
    with pytest.raises(SystemExit) as end:
        main(["report", str(run_dir / "nowhere")])
    assert end.value.code == 2
