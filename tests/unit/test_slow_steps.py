"""Why a step took as long as it did: the sentence, and what it rests on in a run folder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.report.data import collect
from asyncrl.report.slow import SLOW, explain
from tests.unit.run_folders import make_run, step_record, write_lines


def test_with_a_trace_the_limit_of_a_step_is_what_it_waited_for():
    step = {
        "learner": {"wait_batch": 4.0, "forward": 6.0}, "generator": {"decode": 7.0, "eval": 3.0},
    }  # fmt: skip
    [without] = explain([step])
    assert without.text.endswith("pipeline.depth), if not evaluation.")
    [known] = explain([step], meanwhile=[{"eval": 0.75, "decode": 0.25}])
    assert "generators evaluate 30%: evaluation is the bottleneck" in known.text
    assert "if not" not in known.text


def usual_step(**more):
    return {"learner": {"wait_batch": 0.2, "forward": 0.8, **more}, "generator": {"decode": 1.0}}


def test_a_slow_step_is_explained_by_what_it_had_more_than_its_neighbours():
    steps = [usual_step() for _ in range(21)]
    steps[10] = {
        "learner": {"wait_batch": 4.2, "forward": 0.8, "checkpoint": 0.1},
        "generator": {"eval": 4.0, "decode": 1.0},
    }
    found = explain(steps)
    assert [e.slow for e in found] == [i == 10 for i in range(21)]
    slow = found[10]
    assert (slow.seconds, slow.usual_s) == (pytest.approx(5.1), pytest.approx(1.0))
    assert slow.text.startswith("5.1 s, 5.1 times the usual 1.0 s. More than usual: ")
    # 4.0 s of 4.1 s; the checkpoint's 0.1 s are less than a tenth of it.
    assert (
        "4.0 s waiting for its batch; meanwhile the generators spent 80% evaluating, 20% dec"
        in slow.text
    )
    assert "checkpoint" not in slow.text
    assert "evaluation is the bottleneck" in slow.text


def test_a_step_in_which_a_generator_was_started_again_says_so():
    steps = [usual_step() for _ in range(5)]
    steps[2] = {
        "learner": {"wait_batch": 9.5, "forward": 0.5},
        "generator": {"start": 9.3, "wait_score": 0.4, "other": 0.3},
    }
    text = explain(steps)[2].text
    assert "meanwhile the generators spent 93% starting up" in text
    assert text.endswith("batches 95%, generators start up 93%: see logs/.")


def test_a_step_that_waited_no_longer_than_others_does_not_blame_the_generators():
    steps = [usual_step() for _ in range(5)]
    steps[2] = usual_step(checkpoint=3.0)
    text = explain(steps)[2].text
    assert "3.0 s saving a checkpoint" in text
    assert "meanwhile" not in text


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=40))
def test_usual_is_the_median_of_up_to_ten_steps_on_each_side(seconds):
    found = explain([{"learner": {"forward": s}} for s in seconds])
    for index, step in enumerate(found):
        around = sorted(
            s for i, s in enumerate(seconds) if i != index and index - 10 <= i <= index + 10
        )
        if not around:
            assert (step.usual_s, step.slow) == (step.seconds, False)
            continue
        middle = (around[(len(around) - 1) // 2] + around[len(around) // 2]) / 2
        assert step.usual_s == pytest.approx(middle)
        assert step.slow == (step.seconds > SLOW * step.usual_s)


def test_steps_without_any_time_on_record_are_no_reason_to_fail():
    found = explain([{}, usual_step(), {}])
    assert [e.slow for e in found] == [False, False, False]


def test_a_step_with_an_alert_about_staleness_is_not_advised_to_have_more(tmp_path):
    run_dir = make_run(tmp_path / "run")
    records = [step_record(s, alerts=["mismatch"] if s == 2 else []) for s in range(4)]
    write_lines(run_dir / "metrics.jsonl", records)
    for kind, spans in (
        ("learner", (("wait_batch", 0, 1), ("wait_batch", 1, 4), ("forward", 4, 10))),
        ("generator", (("decode", 0, 7), ("eval", 7, 10))),
    ):
        common = {"pid": kind, "tid": kind}
        args = {"kind": kind, "boot": "b", "ahead_s": 0.0}
        write_lines(
            run_dir / f"trace/{kind}.jsonl",
            [
                {"name": "start", "ph": "i", "ts": 0, "args": args} | common,
                *(
                    {"name": f"{kind}/{cause}", "ph": "X", "ts": a * 10**6, "dur": (b - a) * 10**6}
                    | common
                    for cause, a, b in spans
                ),
                {"name": "version", "ph": "i", "ts": 10**7, "args": {"version": 1}} | common,
                {"name": "end", "ph": "i", "ts": 10**7} | common,
            ],
        )
    data = collect(run_dir)
    texts = [text for *_, text in data["notes"]["times"]]
    assert ["speak against it: mismatch" in text for text in texts] == [False, False, True, False]
    # Of the run as a whole, in which it was on.
    sentence = data["causes"]["strips"]["sentence"]
    assert "speak against it: mismatch" in sentence
    # Generators decoded while the learner waited, and it is known that they did.
    assert "40%: generation is" in texts[0]
    assert "if not" not in texts[0] + sentence
