"""Seconds by cause and step, and what limits the run as a whole."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.report.causes import (
    NUM_BINS,
    causes_by_step,
    meanwhile_by_step,
    spread,
    step_windows,
    strips,
)
from asyncrl.telemetry.bottleneck import Split
from asyncrl.telemetry.lives import Life, Span


def life(spans, *, kind="learner", process=None, start=0.0, end=100.0, versions=(), steps=()):
    """`spans`: (cause, start, end); `versions` published and `steps` recorded: (version, at)."""
    made = Life(
        process=process or kind, kind=kind, boot="b", ahead_s=0.0, start_s=start, end_s=end,
        spans=[Span(f"{kind}/{cause}", float(a), float(b)) for cause, a, b in spans],
        marks=[
            {"name": name, "ts": at * 1e6, "args": {"version": version}}
            for name, marks in (("version", versions), ("step", steps)) for version, at in marks
        ],
    )  # fmt: skip
    made.spans.sort(key=lambda span: (span.start_s, -span.end_s))
    return made


@st.composite
def lives_and_windows(draw):
    """Spans and windows on whole seconds of 0..30, so that counting seconds is exact."""
    edges = sorted(draw(st.lists(st.integers(0, 30), min_size=0, max_size=8)))
    spans = [
        (draw(st.sampled_from("abc")), a, b)
        for a, b in zip(edges[::2], edges[1::2], strict=False)
        if a < b
    ]
    start = draw(st.integers(0, 5)) if not spans else min(a for _, a, _ in spans)
    end = draw(st.integers(25, 30)) if not spans else max(b for _, _, b in spans)
    cuts = sorted(set(draw(st.lists(st.integers(0, 32), min_size=2, max_size=8))))
    windows = [(float(a), float(b)) for a, b in pairwise(cuts)]
    if draw(st.booleans()):
        windows = windows[::2]  # with gaps
    return life(spans, start=float(start), end=float(end)), windows


@given(lives_and_windows(), lives_and_windows())
def test_seconds_in_windows_equal_a_count_second_by_second(first, second):
    windows = first[1]
    found = spread([first[0], second[0]], windows)
    for (start, end), causes in zip(windows, found, strict=True):
        wanted = {}
        for one in (first[0], second[0]):
            for at in range(int(start), int(end)):
                if not one.start_s <= at < one.end_s:
                    continue
                inside = [s.cause for s in one.spans if s.start_s <= at < s.end_s]
                cause = inside[-1] if inside else "other"
                wanted[cause] = wanted.get(cause, 0.0) + 1.0
        assert causes == wanted


def test_a_scoring_process_without_work_is_idle():
    scorer = life([("score", 2, 5)], kind="scorer", end=10.0)
    assert spread([scorer], [(0.0, 10.0)]) == [{"score": 3.0, "idle": 7.0}]


def test_a_step_is_what_lies_between_two_publications():
    learner = life(
        [("wait_batch", 10, 14), ("forward", 14, 20), ("wait_batch", 20, 21), ("forward", 21, 30)],
        versions=[(1, 20.0), (2, 30.0)],
    )
    generator = life([("decode", 0, 17), ("wait_credit", 17, 40)], kind="generator")
    assert step_windows([learner, generator]) == {0: (10.0, 20.0), 1: (20.0, 30.0)}
    assert causes_by_step([learner, generator]) == {
        0: {
            "learner": {"wait_batch": 4.0, "forward": 6.0},
            "generator": {"decode": 7.0, "wait_credit": 3.0},
        },
        1: {"learner": {"wait_batch": 1.0, "forward": 9.0}, "generator": {"wait_credit": 10.0}},
    }


def test_a_step_has_its_own_checkpoint_and_record_also_the_last_one():
    # Joined at 8. Published at 20 and 33, recorded up to 27 and 39; the recording goes on for a second.
    learner = life(
        [
            ("start", 0, 8), ("snapshot", 8, 10), ("wait_batch", 10, 14), ("forward", 14, 20),
            ("checkpoint", 20, 25), ("record", 25, 28), ("wait_batch", 28, 29), ("forward", 29, 33),
            ("checkpoint", 33, 38), ("record", 38, 40), ("eval", 40, 60),
        ],
        versions=[(4, 9.0), (5, 20.0), (6, 33.0)], steps=[(5, 27.0), (6, 39.0)],
    )  # fmt: skip
    found = causes_by_step([learner])
    assert {step: kinds["learner"] for step, kinds in found.items()} == {
        4: {"snapshot": 2.0, "wait_batch": 4.0, "forward": 6.0, "checkpoint": 5.0, "record": 2.0},
        5: {"record": 2.0, "wait_batch": 1.0, "forward": 4.0, "checkpoint": 5.0},
    }


def test_what_a_learner_waited_for_in_a_step_is_what_generators_did_in_those_seconds():
    # Step 0 waits from 10 to 14 and from 15 to 17, and one wait is cut by its end at 20; step 2
    # does not wait.
    learner = life(
        [
            ("start", 0, 10), ("wait_batch", 10, 14), ("forward", 14, 15), ("wait_batch", 15, 17),
            ("forward", 17, 19), ("wait_batch", 19, 24), ("forward", 24, 40),
        ],
        steps=[(1, 20.0), (2, 30.0), (3, 40.0)],
    )  # fmt: skip
    generator = life(
        [("start", 0, 11), ("decode", 11, 16), ("eval", 16, 23), ("decode", 23, 40)],
        kind="generator",
    )
    other = life([("decode", 21, 22), ("wait_score", 22, 40)], kind="generator", start=21.0)
    assert meanwhile_by_step([learner, generator, other]) == {
        0: {"decode": 4 / 6, "eval": 2 / 6},  # 11 to 14 and 15 to 16; 16 to 17 and 19 to 20
        1: {
            "decode": 2 / 7,
            "eval": 3 / 7,
            "wait_score": 2 / 7,
        },  # the other one lives for three seconds
        2: {},
    }
    assert meanwhile_by_step([]) == {}


def test_other_ranks_of_the_learner_are_not_counted_twice():
    first = life([("wait_batch", 0, 4), ("forward", 4, 10)], versions=[(1, 10.0)])
    second = life([("forward", 4, 10)], process="learner-1")
    assert causes_by_step([first, second])[0]["learner"] == {"wait_batch": 4.0, "forward": 6.0}


def test_steps_that_a_resumed_run_made_again_are_those_of_the_second_attempt():
    first = life(
        [("wait_batch", 0, 1)], end=31.0, versions=[(1, 5.0), (2, 10.0), (3, 20.0), (4, 30.0)]
    )
    # Resumed at version 2, which it publishes before it waits for a batch.
    second = life([("wait_batch", 52, 55)], start=50.0, versions=[(2, 51.0), (3, 60.0)])
    # Step 3, made by the first attempt alone, is none of the surviving history.
    assert step_windows([first, second]) == {0: (0.0, 5.0), 1: (5.0, 10.0), 2: (52.0, 60.0)}


def test_strips_cover_the_run_and_its_training_and_sum_to_the_time_a_process_lived():
    learner = life(
        [("start", 0, 40), ("wait_batch", 40, 50), ("forward", 50, 90)], end=120.0,
        versions=[(1, 90.0)],
    )  # fmt: skip
    generator = life([("decode", 30, 60)], kind="generator", start=30.0, end=60.0)
    found = strips([learner, generator], Split(1, 3))
    assert [p["name"] for p in found["processes"]] == ["learner", "generator"]
    whole, training = found["views"]
    assert (whole["start"], whole["seconds"]) == (0.0, 120.0)
    assert (training["start"], training["seconds"]) == (50.0, 40.0)  # first batch to last version
    lived = [sum(sum(bin_.values()) for bin_ in bins) * 120 / NUM_BINS for bins in whole["bins"]]
    assert lived == pytest.approx([120.0, 30.0], abs=0.05)
    assert found["shares"]["learner"] == {"forward": 1.0}
    assert strips([], None) == {}


def test_the_shares_of_a_resumed_run_are_those_of_its_sentence():
    # Two attempts of 10 s of training each, the learner waits for 4 and for 5 s of them; between them
    # 30 s without any process and 40 s of start-up.
    def learner(start, joined, waited_s, version):
        return life(
            [
                ("start", start, joined), ("wait_batch", joined, joined),
                ("wait_batch", joined, joined + waited_s),
                ("forward", joined + waited_s, joined + 10),
            ],
            start=start, end=joined + 10, versions=[(version, joined + 10.0)],
        )  # fmt: skip

    def generator(start, joined):
        spans = [("start", start, joined), ("decode", joined, joined + 9)]
        return life(spans, kind="generator", start=start, end=joined + 10)

    lives = [
        learner(-20.0, 0.0, 4, 1), generator(-20.0, 0.0),
        learner(40.0, 80.0, 5, 2), generator(40.0, 80.0),
    ]  # fmt: skip
    found = strips(lives, None)
    assert found["shares"] == {
        "learner": {"wait_batch": 0.45, "forward": 0.55}, "generator": {"decode": 0.9, "other": 0.1},
    }  # fmt: skip
    assert found["sentence"].startswith("learner waits for batches 45%: generation is")
    assert "alerts" not in found["sentence"]
    assert "against it: variance" in strips(lives, None, {"variance", "clipped"})["sentence"]


def test_start_up_is_shown_where_it_is_what_the_learner_waits_for():
    learner = life(
        [("wait_batch", 0, 1), ("wait_batch", 1, 9), ("forward", 9, 11)],
        end=11.0,
        versions=[(1, 11.0)],
    )
    generator = life([("start", 2, 8), ("decode", 8, 12)], kind="generator", start=2.0, end=12.0)
    found = strips([learner, generator], None)
    # Of 10 s after the first batch the learner waits for 8; the generator lives for 9, starts for 6.
    assert found["shares"]["generator"] == {"start": 0.6667, "decode": 0.3333}
    assert "80%, generators start up 67%" in found["sentence"]


def test_the_whole_run_is_limited_by_what_generators_did_while_the_learner_waited():
    # Of 100 s the learner waits for 40: 30 of them in an evaluation; the generator decodes for 70.
    learner = life(
        [("wait_batch", 0, 1), ("forward", 1, 61), ("wait_batch", 61, 101)], end=101.0,
        versions=[(1, 101.0)],
    )  # fmt: skip
    generator = life([("decode", 1, 71), ("eval", 71, 101)], kind="generator", end=101.0)
    found = strips([learner, generator], None)
    assert found["limit"] == "evaluation"
    assert found["sentence"].startswith("learner waits for batches 40%, generators evaluate 30%")
