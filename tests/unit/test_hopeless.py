"""When a scorer is given up: 64 verdicts without a score, aborted completions aside."""

from collections import Counter

import pytest

from asyncrl.errors import ConfigError
from asyncrl.generator.hopeless import check_scorer
from asyncrl.types import Verdict

ERROR = Verdict(status="error", detail="KeyError: 'answer'")


def test_the_64th_verdict_without_any_score_ends_the_run_with_the_last_reason():
    counts = Counter({"verdict/error": 40, "verdict/timeout": 20, "verdict/abstained": 3})
    check_scorer(counts, ERROR)
    counts["verdict/error"] += 1
    with pytest.raises(ConfigError, match=r"first 64 completions .*'error': KeyError: 'answer'"):
        check_scorer(counts, ERROR)


def test_one_score_ever_is_enough():
    counts = Counter({"verdict/error": 1000, "verdict/scored": 1})
    check_scorer(counts, ERROR)
    check_scorer(Counter({"verdict/error": 1000}), Verdict(status="scored", score=0.0))


def test_completions_that_the_engine_aborted_say_nothing_about_the_scorer():
    counts = Counter({"verdict/abstained": 100, "finish/abort": 37})
    check_scorer(counts, ERROR)  # 63
    counts["finish/abort"] = 36
    with pytest.raises(ConfigError):
        check_scorer(counts, ERROR)
