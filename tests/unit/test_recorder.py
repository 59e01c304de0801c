"""One record a step: what it holds when nothing was trained, and whether its numbers can be true."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.advantages import mean, raw, with_overlong_penalty
from asyncrl.config import RunConfig
from asyncrl.learner import records
from asyncrl.learner.controller import Decision
from asyncrl.learner.inbox import Delivery
from asyncrl.learner.recorder import Recorder
from asyncrl.learner.step import StepResult
from asyncrl.telemetry.alerts import Watch
from asyncrl.telemetry.metrics import METRICS, resolve
from asyncrl.telemetry.trace import Tracer
from asyncrl.wire.messages import Batch, EvalDone, LedgerCounts
from tests.reference.groups import group, rollout
from tests.reference.stepping import pack

CONFIG = {"model": {"path": "x"}, "task": {"kind": "repeat_letter"}}
SHARES = [name for name in METRICS if "frac" in name.rpartition("/")[2]]
UNTRAINED = StepResult(
    skipped="no tokens",
    sums={},
    values={"optimizer/skipped": 1.0, "optimizer/updates": 0.0},
    num_measured=0.0,
    num_nonfinite=0,
)


@pytest.fixture
def recorder(tmp_path):
    config = RunConfig.model_validate(CONFIG)
    found = Recorder(config, run_dir=tmp_path, run_id="r", first_version=0)
    yield found
    found.close()


def record_step(recorder, groups, *, spans=None):
    recorder.step(
        Delivery(groups, 0, None),
        batch=pack(groups),
        result=UNTRAINED,
        bound=Decision(0),
        spans=spans or {},
    )


def written(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_without_counted_tokens_has_no_metrics_of_tokens(recorder, tmp_path):
    # F016: absent, neither 0 nor divided by a clamped 1.
    record_step(recorder, [group([1], [rollout([2, 3], status="error") for _ in range(2)])])
    [record] = written(tmp_path)
    assert record["skipped"] == "no tokens"
    assert record["optimizer/skipped"] == 1.0
    families = ("loss/", "mismatch/", "ratio/", "correction/", "policy/", "staleness/mean")
    assert [name for name in record if name.startswith(families)] == []
    assert "reward/mean" not in record
    assert record["rate/trained_tokens_per_s"] == 0.0
    assert record["rollouts/unscored_frac"] == 1.0


def test_an_evaluation_without_a_score_is_null_on_record_and_no_metric(recorder, tmp_path):
    empty = EvalDone(
        version=4, mean_score=None, num_samples=0, num_unscored=8, mean_tokens=2.5, seconds=1.0
    )
    recorder.evaluations([empty])
    [line] = (tmp_path / "evals.jsonl").read_text().splitlines()
    assert json.loads(line)["mean_score"] is None
    rest = {"eval/version": 4.0, "eval/unscored": 8.0, "eval/tokens_mean": 2.5}
    assert records.eval_values(empty) == rest
    full = empty.model_copy(update={"mean_score": 0.0, "num_samples": 8, "num_unscored": 0})
    assert records.eval_values(full) == rest | {"eval/score": 0.0, "eval/unscored": 0.0}


def test_the_record_of_an_evaluation_says_of_how_many_prompts_its_samples_are(tmp_path):
    # A prompt that is too long is left out: 7 of 8 came, 3 samples each, 2 of them without a score.
    config = RunConfig.model_validate(
        CONFIG | {"eval": {"num_prompts": 8, "samples_per_prompt": 3}}
    )
    recorder = Recorder(config, run_dir=tmp_path, run_id="r", first_version=0)
    done = EvalDone(
        version=0, mean_score=0.5, num_samples=19, num_unscored=2, mean_tokens=2.0, seconds=1.0
    )
    recorder.evaluations([done])
    recorder.close()
    assert json.loads((tmp_path / "evals.jsonl").read_text())["num_prompts"] == 7


def test_scripted_pauses_are_idle_time_and_the_parts_add_up_to_the_wall_time(tmp_path, monkeypatch):
    # F088: three pauses of 5 s, then 4 s of work and 1 s of snapshot; the next step waits 2 of 3 s.
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    config = RunConfig.model_validate(CONFIG)
    recorder = Recorder(config, run_dir=tmp_path, run_id="r", first_version=0)
    tracer = Tracer(None, process="learner")
    script = [
        [("wait_batch", 5)] * 3 + [("build", 1), ("forward", 1), ("backward", 2), ("snapshot", 1)],
        [("wait_batch", 2), ("forward", 1)],
    ]
    for spans in script:
        for name, seconds in spans:
            with tracer.span(f"learner/{name}"):
                now_s[0] += seconds
        record_step(recorder, [group([1], [rollout([2])])], spans=tracer.totals())
    recorder.close()
    first, second = written(tmp_path)
    assert (first["time/wait_batch_s"], second["time/wait_batch_s"]) == (15.0, 2.0)
    assert (first["time/step_s"], second["time/step_s"]) == (20.0, 3.0)
    assert first["learner/busy_frac"] == pytest.approx(5 / 20)
    for record in (first, second):
        parts = [v for k, v in record.items() if k.startswith("time/") and k != "time/step_s"]
        assert sum(parts) == pytest.approx(record["time/step_s"])


def test_shares_of_all_processes_are_over_the_same_second_or_more_and_name_the_limit(
    tmp_path, monkeypatch
):
    # Steps of 0.5 s. The counters at step 0 have start-up behind them; from then on generators spend
    # 8 of 10 parts waiting for credit, and the learner waits for 1 of 10 parts of its time.
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    recorder = Recorder(
        RunConfig.model_validate(CONFIG), run_dir=tmp_path, run_id="r", first_version=0
    )
    ledger = LedgerCounts(
        admitted=0, trained=0, dropped_stale=0, dropped_filtered=0, failed=0, queued=0, in_flight=0
    )
    groups = [group([1], [rollout([2])])]
    for step in range(6):
        now_s[0] += 0.5
        counters = {
            "generator/start": 60.0, "generator/wait_credit": 0.4 * step,
            "generator/decode": 0.1 * step, "broker/idle": 0.5 * step, "sampled_tokens": 5.0 * step,
        }  # fmt: skip
        spans = {
            "learner/start": 9.0,
            "learner/wait_batch": 0.05 * step,
            "learner/forward": 0.45 * step,
        }
        batch = Batch(
            step=0, groups=[], max_staleness=0, cursor=0, ledger=ledger, counters=counters, evals=[]
        )
        recorder.step(
            Delivery(groups, 0, batch),
            batch=pack(groups), result=UNTRAINED, bound=Decision(0), spans=spans,
        )  # fmt: skip
    recorder.close()
    records = written(tmp_path)
    # Step 0 is at 100.5 s; step 2 is the first that has a second behind it.
    assert ["bottleneck" in record for record in records] == [False] * 2 + [True] * 4
    assert not any(name.startswith("share/") for name in records[1])
    for record in records[2:]:
        assert record["bottleneck"] == "learner"
        assert {n: round(v, 9) for n, v in record.items() if n.startswith("share/")} == {
            "share/generator@start": 0.0, "share/generator@wait_credit": 0.8,
            "share/generator@decode": 0.2, "share/broker@idle": 1.0,
            "share/learner@start": 0.0, "share/learner@wait_batch": 0.1,
            "share/learner@forward": 0.9,
        }  # fmt: skip


scored = st.builds(
    lambda length, score, finish, status: rollout(
        [3] * length, score=score, finish=finish, status=status
    ),
    st.integers(1, 4),
    st.sampled_from([-1.0, 0.0, 0.5, 1.0]),
    st.sampled_from(["stop", "length", "abort"]),
    st.sampled_from(["scored", "error", "timeout", "abstained"]),
)


@given(st.lists(st.lists(scored, min_size=1, max_size=4), min_size=1, max_size=3))
def test_every_share_of_a_batch_lies_between_0_and_1(members):
    # F089, and the mean length is that of all rollouts, those that train no token included.
    groups = [group([1], rollouts) for rollouts in members]
    step = pack(groups)
    found = resolve(step.sums | records.batch_sums(groups), step.counts)
    shares = {name: value for name, value in found.items() if name in SHARES}
    assert "tokens/truncated_frac" in shares
    assert all(0.0 <= value <= 1.0 for value in shares.values()), shares
    assert shares["groups/frac_mixed"] + shares["groups/frac_zero_signal"] <= 1.0
    lengths = [len(r.completion_tokens) for item in groups for r in item.rollouts]
    assert found["tokens/completion_mean"] == pytest.approx(np.mean(lengths))


def ended(finish, *scores):
    """A group whose completions are 1, 2, ... tokens long."""
    return group(
        [1],
        [rollout([2] * (i + 1), score=score, finish=finish) for i, score in enumerate(scores)],
    )


MIXED, CUT_OFF = ended("stop", 0.0, 1.0), ended("length", 0.0, 1.0)
EQUAL, ROUNDED, SINGLE = (ended("stop", *s) for s in ((1.0, 1.0), (1.0, 1.0 + 5e-7), (1.0,)))
PENALISED = with_overlong_penalty(mean, max_completion_tokens=2, buffer_tokens=1)
FAILED = group([1], [rollout([2], status="error") for _ in range(2)])


@pytest.mark.parametrize(
    ("groups", "how", "teaching", "mixed", "equal"),
    [
        ([MIXED, CUT_OFF, EQUAL, FAILED], {}, 2, 2, 1),
        # Of a group that is cut off as a whole no token is trained, and its scores differ all the same.
        ([MIXED, CUT_OFF, EQUAL, FAILED], {"mask_truncated": True}, 1, 2, 1),
        # Lengths 1 and 2 with a slope from 1 to 2 tokens: equal scores become 1 and 0.
        ([EQUAL], {"advantage": PENALISED}, 1, 0, 1),
        ([SINGLE], {}, 0, 0, 1),
        ([SINGLE], {"advantage": raw}, 1, 0, 1),
        # As the broker judges them (scores.py): closer together than 1e-6.
        ([ROUNDED], {}, 1, 0, 1),
    ],
)  # fmt: skip
def test_groups_that_teach_and_groups_whose_scores_differ_are_counted_apart(
    groups, how, teaching, mixed, equal
):
    step = pack(groups, **how)
    found = resolve(step.sums | records.batch_sums(groups), step.counts)
    counts = [
        found[f"groups/frac_{name}"] * len(groups) for name in ("teaching", "mixed", "zero_signal")
    ]
    assert counts == [teaching, mixed, equal]
    # An alert says that there is no signal where nothing teaches, whatever the scores are.
    watch = Watch()
    on = {alert.name for _ in range(5) for alert in watch.step(found)[0]}
    assert ("no_signal" in on) == (teaching == 0)


@given(
    before=st.floats(0, 1e6),
    spent=st.floats(0, 1e6),
    seconds=st.floats(1e-9, 1e4),
    num_generators=st.integers(1, 8),
)
def test_generators_are_busy_for_a_share_of_the_time_and_events_not_yet_sent_are_0(
    before, spent, seconds, num_generators
):
    # F089: busy time arrives in portions, late, so that one window may get more than it lasted.
    values = records.generator_values(
        {"generator/decode": before + spent},
        {"generator/decode": before},
        seconds=seconds,
        num_generators=num_generators,
    )
    assert 0.0 <= values["generator/busy_frac"] <= 1.0
    nothing = records.generator_values({}, {}, seconds=seconds, num_generators=num_generators)
    assert set(nothing.values()) == {0.0}
    assert not {"generator/busy_frac", "rate/sampled_tokens_per_s"} & set(nothing)


def test_generators_are_measured_by_the_time_between_the_brokers_own_totals():
    # 4 s of the broker, of which two generators were busy for 6 of 8; the step itself took 10 s.
    before = {"broker/idle": 1.0, "generator/decode": 2.0, "generator/wait_credit": 1.0}
    before["sampled_tokens"] = 100.0
    now = {"broker/idle": 4.5, "broker/other": 0.5, "generator/decode": 8.0}
    now |= {"generator/wait_credit": 3.0, "sampled_tokens": 180.0}
    values = records.generator_values(now, before, seconds=10.0, num_generators=2)
    assert values["generator/busy_frac"] == 0.75
    assert values["rate/sampled_tokens_per_s"] == 20.0
    assert values["share/generator@wait_credit"] == 0.25  # busy and waiting are of the same time


def test_a_rate_is_left_out_until_a_report_has_brought_its_count():
    # A first report may be of the start alone; before any completion has ended it brings no tokens.
    values = records.generator_values({"generator/start": 2.0}, {}, seconds=1.0, num_generators=1)
    assert "generator/busy_frac" not in values
    began = {"generator/start": 2.0, "generator/decode": 0.5}
    values = records.generator_values(began, {}, seconds=1.0, num_generators=1)
    assert values["generator/busy_frac"] == 0.5
    assert "rate/sampled_tokens_per_s" not in values
    # 30 tokens in 2 s; then 2 s in which none ended, which is a rate of 0 and is known.
    first = began | {"sampled_tokens": 30.0}
    values = records.generator_values(first, began, seconds=2.0, num_generators=1)
    assert values["rate/sampled_tokens_per_s"] == 15.0
    values = records.generator_values(first, first, seconds=2.0, num_generators=1)
    assert values["rate/sampled_tokens_per_s"] == 0.0


@pytest.mark.parametrize("in_flight", [2, 3, 4])
def test_books_that_do_not_close_end_the_run(in_flight):
    # F091: 20 started = 8 trained + 2 stale + 1 filtered + 1 failed + 5 waiting + 3 being sampled.
    ledger = LedgerCounts(
        admitted=20, trained=8, dropped_stale=2, dropped_filtered=1, failed=1, queued=5,
        in_flight=in_flight,
    )  # fmt: skip
    batch = Batch(
        step=0, groups=[], max_staleness=0, cursor=0, ledger=ledger, counters={}, evals=[]
    )
    if in_flight == 3:
        assert records.ledger_values(batch)["ledger/trained"] == 8.0
        return
    with pytest.raises(AssertionError, match="does not balance"):
        records.ledger_values(batch)
