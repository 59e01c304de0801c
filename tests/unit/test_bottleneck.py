"""Which side is said to be the bottleneck, for shares whose story is known."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry.bottleneck import QUIET, Split, diagnose

# What a learner that has no batch does, and what it does otherwise, in percent.
STARVED = {"wait_batch": 80, "forward": 8, "backward": 10, "optimizer": 2}
FULL = {"wait_batch": 2, "forward": 38, "backward": 50, "optimizer": 10}

STORIES = [
    ("learner", FULL, {"wait_credit": 63, "decode": 37}, {}, "for credit 63%: the learner is"),
    ("generation", STARVED, {"decode": 90, "prefill": 6, "other": 4}, {}, "batches 80%: generation is"),
    ("generation", STARVED, {"decode": 30, "prefill": 35, "wait_score": 35}, {}, "engines_per_gpu"),
    ("scoring", STARVED, {"wait_score": 70, "decode": 30}, {"score": 95}, "scoring.num_workers"),
    ("scoring", STARVED, {"wait_score": 70, "decode": 30}, {"score": 20}, "a faster scorer"),
    ("weights", STARVED, {"wait_weights": 75, "adopt": 5, "decode": 20}, {}, "for weights 75%"),
    ("weights", STARVED, {"adopt": 60, "decode": 40}, {}, "adoption stalls generators 60%"),
    ("evaluation", STARVED, {"eval": 85, "decode": 15}, {}, "eval.every_steps"),
    ("overhead", STARVED, {"other": 70, "decode": 30}, {}, "outside of their engine 70%"),
    ("checkpoint", {"wait_batch": 1, "checkpoint": 70, "forward": 29},
     {"wait_credit": 75, "decode": 25}, {}, "checkpoint.every_steps"),
    # Synchronous and even: while one computes the other waits.
    ("turns", {"wait_batch": 50, "forward": 50}, {"decode": 50, "wait_credit": 50}, {}, "take turns"),
    # Synchronous and uneven: the slow side is named, not the turns.
    ("learner", {"wait_batch": 15, "forward": 85}, {"decode": 15, "wait_credit": 85}, {}, "learner is"),
    ("generation", {"wait_batch": 85, "forward": 15}, {"decode": 85, "wait_credit": 15}, {}, "depth"),
    ("learner", {"wait_batch": 30, "forward": 70}, {"decode": 30, "wait_credit": 70}, {}, "learner is"),
    # Both wait a little, now and then: the side that loses more of it is named.
    ("generation", {"wait_batch": 20, "forward": 80}, {"decode": 84, "wait_credit": 16}, {}, "depth"),
    # Nobody computes: it is what lies between them.
    ("turns", STARVED, {"wait_credit": 80, "decode": 20}, {}, "publishing and messages"),
    # Scorers may be busy and generators wait for them as they like, if the learner never waits.
    ("none", FULL, {"wait_score": 90, "decode": 10}, {"score": 100}, "neither side waits"),
    ("none", {"wait_batch": 8, "forward": 92}, {"wait_credit": 9, "decode": 91}, {}, "neither"),
]  # fmt: skip


def of(percent):
    return {cause: share / 100 for cause, share in percent.items()}


@pytest.mark.parametrize(("limit", "learner", "generator", "scorer", "words"), STORIES)
def test_the_named_limit_is_the_one_of_the_story(limit, learner, generator, scorer, words):
    assert sum(generator.values()) == 100
    scorer = scorer and scorer | {"other": 100 - scorer["score"]}
    found = diagnose({"learner": of(learner), "generator": of(generator), "scorer": of(scorer)})
    assert found.limit == limit, found
    assert words in found.text


@pytest.mark.parametrize(("limit", "learner", "generator", "scorer", "words"), STORIES)
def test_more_staleness_is_not_advised_without_naming_the_alerts_that_speak_against_it(
    limit, learner, generator, scorer, words
):
    shares = {"learner": of(learner), "generator": of(generator), "scorer": of(scorer)}
    plain = diagnose(shares).text
    assert diagnose(shares, alerts=["clipped", "no_signal"]).text == plain
    found = diagnose(shares, alerts=["truncated", "clipped", "mismatch"]).text
    advice = "pipeline.max_staleness or pipeline.depth"
    against = "but alerts speak against it: mismatch, truncated"
    assert (advice in plain) == (limit in ("generation", "turns") or "for weights" in words)
    assert found == plain.replace(advice, f"{advice}, {against}")


@pytest.mark.parametrize(("limit", "learner", "generator", "scorer", "words"), STORIES)
def test_start_up_of_either_side_changes_nothing(limit, learner, generator, scorer, words):
    late = {cause: share / 4 for cause, share in learner.items()} | {"start": 75}
    slow = {cause: share / 2 for cause, share in generator.items()} | {"start": 50}
    found = diagnose({"learner": of(late), "generator": of(slow)})
    assert found.limit == limit


@pytest.mark.parametrize(
    ("limit", "learner", "generator", "words"),
    [
        ("start", {"wait_batch": 95, "forward": 5}, {"start": 93, "wait_score": 4, "other": 3},
         "learner waits for batches 95%, generators start up 93%: see logs/"),
        ("start", {"wait_batch": 99, "forward": 1}, {"start": 100}, "start up 100%"),
        # One of four engines is started again, the other three are what the learner waits for.
        ("generation", STARVED, {"start": 25, "decode": 75}, "generation is the bottleneck"),
        # The learner does not wait for the one that starts: of the others' time 80 % is credit.
        ("learner", FULL, {"start": 50, "wait_credit": 40, "decode": 10}, "for credit 80%: the learner"),
        # The learner starts as well: it is the beginning of an attempt.
        ("scoring", {"start": 1, "wait_batch": 95, "forward": 4},
         {"start": 93, "wait_score": 4, "other": 3}, "scoring is the bottleneck"),
    ],
)  # fmt: skip
def test_engines_that_start_while_the_learner_trains_are_named_if_it_waits_for_them(
    limit, learner, generator, words
):
    found = diagnose({"learner": of(learner), "generator": of(generator)})
    assert found.limit == limit
    assert words in found.text


def test_one_side_alone_has_nothing_to_be_compared_with():
    for shares in ({}, {"learner": of(STARVED)}, {"generator": {"decode": 1.0}}):
        assert diagnose(shares).limit == "none"
    assert diagnose({"learner": {"start": 1.0}, "generator": {"decode": 1.0}}).limit == "none"


def shares_of(*causes):
    return st.dictionaries(
        st.sampled_from(causes), st.floats(0.001, 1.0), min_size=1
    ).map(lambda parts: {name: part / sum(parts.values()) for name, part in parts.items()})  # fmt: skip


@given(
    shares_of("start", "wait_batch", "forward", "backward", "checkpoint", "other"),
    shares_of(
        "start", "decode", "prefill", "eval", "adopt", "wait_credit", "wait_score", "wait_weights",
        "other",
    ),
)  # fmt: skip
def test_whatever_the_shares_are_a_sentence_comes_and_costs_no_more_than_the_side_that_waits(
    learner, generator
):
    found = diagnose({"learner": learner, "generator": generator})
    assert 0.0 <= found.cost <= 1.0 + 1e-9
    assert (found.limit == "none") == (found.cost < QUIET)
    running = 1.0 - learner.get("start", 0.0)
    if running > 1e-6 and found.limit not in ("none", "learner", "checkpoint"):
        assert found.cost <= learner.get("wait_batch", 0.0) / running + 1e-9


@pytest.mark.parametrize(
    ("learner", "generator", "split", "words"),
    [
        # 6 * 0.96 busy GPUs sample, 2 * 0.2 train: 8 * 0.4 / 6.16 = 0.52.
        (STARVED, {"decode": 96, "other": 4}, Split(2, 6), "; of these 8 GPUs about 1 for the"),
        # 2 * 0.98 train, 6 * 0.35 sample: 8 * 1.96 / 4.06 = 3.86. Waits of any kind are no work.
        (FULL, {"wait_credit": 60, "wait_score": 5, "decode": 35}, Split(2, 6), "4 for the learner and"),
        (FULL, {"wait_credit": 90, "decode": 10}, Split(1, 2), "2 for the learner and 1 for generators"),
        (FULL, {"wait_credit": 97, "decode": 3}, Split(1, 2), "2 for the learner and 1"),  # not 3 and 0
    ],
)  # fmt: skip
def test_gpus_of_both_sides_are_divided_by_the_work_that_they_do(learner, generator, split, words):
    found = diagnose({"learner": of(learner), "generator": of(generator)}, split)
    assert words in found.text
    assert found.text.endswith(f"now {split.learner} and {split.generators}")
    plain = diagnose({"learner": of(learner), "generator": of(generator)})
    assert found.text.startswith(plain.text)


def test_a_division_that_could_not_be_better_is_not_spoken_of():
    # 1 * 0.2 trains, 3 * 0.9 samples: 4 * 0.2 / 2.9 = 0.28, and one is the least.
    shares = {"learner": of(STARVED), "generator": of({"decode": 90, "wait_score": 10})}
    assert diagnose(shares, Split(1, 3)).text == diagnose(shares).text
    # Nor if GPUs are not what lacks.
    shares["generator"] = of({"wait_score": 70, "decode": 30})
    assert diagnose(shares, Split(1, 3)).text == diagnose(shares).text


NAMES = {
    "decode": "generation", "wait_score": "scoring", "wait_weights": "the weight path",
    "eval": "evaluation", "other": "bookkeeping",
}  # fmt: skip


@given(
    st.lists(st.sampled_from([*NAMES, "wait_credit"]), min_size=8, max_size=8), st.integers(0, 8)
)
def test_without_a_trace_whatever_else_may_have_been_waited_for_longer_is_named(causes, waits):
    """By trying all ways in which the learner may wait for some of 8 seconds that have a cause each."""
    learner = {"wait_batch": waits / 8, "forward": 1 - waits / 8}
    found = diagnose({"learner": learner, "generator": {c: causes.count(c) / 8 for c in causes}})
    limits = {"weights": "the weight path", "overhead": "bookkeeping"}
    named = limits.get(found.limit, found.limit)
    possible = set()
    for seconds in combinations(causes, waits):
        waited = Counter(NAMES.get(cause) for cause in seconds)
        possible |= {name for name in NAMES.values() if waited[name] > waited[named]}
    if named == "generation":
        possible.discard("bookkeeping")  # "another generator" is said already
    said = found.text.partition(", if not ")[2].split(" or ")
    assert set(said) == (possible or {""} if named in NAMES.values() else {""})


def test_with_a_trace_nothing_is_left_open():
    shares = {
        "learner": of({"wait_batch": 40, "forward": 60}),
        "generator": of({"decode": 70, "eval": 30}),
    }
    assert diagnose(shares).text.endswith("depth), if not evaluation")
    assert "if not" not in diagnose(shares, meanwhile={"eval": 0.4, "decode": 0.6}).text
    # Of 80 % of the time at most 30 are not decoding: no other cause comes near.
    shares["learner"] = of(STARVED)
    assert diagnose(shares).text.endswith("depth)")


def test_what_the_learner_waited_for_is_what_generators_did_meanwhile():
    # No batch for 40 % of the time, mostly while an evaluation runs; else generators decode ahead.
    learner = of({"wait_batch": 40, "forward": 60})
    generator = of({"decode": 70, "eval": 30})
    shares = {"learner": learner, "generator": generator}
    assert diagnose(shares).limit == "generation"
    found = diagnose(shares, meanwhile={"eval": 0.75, "decode": 0.25})
    assert (found.limit, found.cost) == ("evaluation", pytest.approx(0.3))  # 0.4 * 0.75
    found = diagnose(shares, meanwhile={"eval": 0.4, "decode": 0.5, "prefill": 0.1})
    assert (found.limit, found.cost) == ("generation", pytest.approx(0.24))
    # A learner that never waits is not accused of it.
    shares["learner"] = of({"forward": 100})
    assert diagnose(shares, meanwhile={"eval": 1.0}).limit == "none"
