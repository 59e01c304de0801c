"""When a scorer is given up: 64 verdicts without a score, or a minute of nothing but timeouts."""

from collections import Counter

import pytest

from asyncrl.config.sections import ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.hopeless import check_scorer
from asyncrl.types import Verdict

SCORING = ScoringConfig()
ERROR = Verdict(status="error", detail="KeyError: 'answer'")
TIMEOUT = Verdict(status="timeout", detail="no verdict within scoring.deadline_s=1")


def test_the_64th_verdict_without_any_score_ends_the_run_with_the_last_reason():
    counts = Counter({"verdict/error": 40, "verdict/timeout": 20, "verdict/abstained": 3})
    check_scorer(counts, ERROR, SCORING)
    counts["verdict/error"] += 1
    with pytest.raises(ConfigError, match=r"first 64 completions .*'error': KeyError: 'answer'"):
        check_scorer(counts, ERROR, SCORING)


def test_one_score_ever_is_enough():
    counts = Counter({"verdict/error": 1000, "verdict/timeout": 1000, "verdict/scored": 1})
    check_scorer(counts, ERROR, SCORING)
    check_scorer(Counter({"verdict/error": 1000}), Verdict(status="scored", score=0.0), SCORING)


def test_completions_that_the_engine_aborted_say_nothing_about_the_scorer():
    counts = Counter({"verdict/abstained": 100, "finish/abort": 37})
    check_scorer(counts, ERROR, SCORING)  # 63
    counts["finish/abort"] = 36
    with pytest.raises(ConfigError, match="first 64 completions"):
        check_scorer(counts, ERROR, SCORING)


@pytest.mark.parametrize(
    ("deadline_s", "num_workers", "limit"),
    [
        (1.0, 1, 60),  # 60 timeouts of 1 s are 60 s
        (10.0, 1, 6),
        (7.0, 1, 9),  # 8 are 56 s
        (10.0, 8, 48),  # 8 in every 10 s
        (60.0, 1, 4),  # 4 deadlines, 240 s
        (60.0, 2, 8),
        (10.0, 100, 64),  # in 10 s: the number of verdicts alone
        (0.1, 1, 64),
    ],
)
def test_a_scorer_that_only_hangs_is_given_up_after_a_minute_or_four_deadlines(
    deadline_s, num_workers, limit
):
    scoring = ScoringConfig(deadline_s=deadline_s, num_workers=num_workers)
    check_scorer(Counter({"verdict/timeout": limit - 1}), TIMEOUT, scoring)
    aborted = Counter({"verdict/timeout": limit, "verdict/abstained": 2, "finish/abort": 2})
    with pytest.raises(ConfigError, match=rf"first {limit} completions .*'timeout': no verdict"):
        check_scorer(aborted, TIMEOUT, scoring)


@pytest.mark.parametrize("other", ["scored", "error", "abstained"])
def test_a_scorer_that_ever_came_back_is_not_given_up_for_its_timeouts(other):
    counts = Counter({"verdict/timeout": 62, f"verdict/{other}": 1})
    check_scorer(counts, TIMEOUT, SCORING)
