"""A sheaf: complete with its last verdict, usable if every log-prob can be one."""

import numpy as np
import pytest

from asyncrl.generator.engine import Completion
from asyncrl.generator.groups import Sheaf
from asyncrl.generator.prompts import Prompt
from asyncrl.tasks.base import Problem
from asyncrl.types import Verdict, VersionSpan


def sheaf_with(logprobs: list[float], finish_reason: str = "stop") -> Sheaf:
    prompt = Prompt(7, Problem(raw_text="q", answer="a"), "q", np.array([1], np.int32))
    sheaf = Sheaf(prompt, size=1)
    sheaf.completions[0] = Completion(
        request_id=3,
        index=0,
        tokens=np.arange(len(logprobs), dtype=np.int32),
        behaviour_logprobs=np.array(logprobs, np.float32),
        version_spans=(VersionSpan(2, 0, len(logprobs)),),
        finish_reason=finish_reason,
    )
    sheaf.texts[0] = "text"
    return sheaf


@pytest.mark.parametrize("broken", [float("nan"), float("-inf"), float("inf"), 0.3])
def test_a_logprob_that_cannot_be_one_makes_the_group_unusable(broken: float) -> None:
    # F020: it is counted and started again; it never reaches the wire, where it would be refused.
    assert not sheaf_with([-0.5, broken]).usable


def test_a_rounding_above_zero_is_usable_and_reaches_the_record() -> None:
    sheaf = sheaf_with([-0.5, 1e-4])
    assert sheaf.usable
    assert not sheaf.complete
    sheaf.verdicts[0] = Verdict(status="scored", score=1.0)
    assert sheaf.complete
    group = sheaf.to_group(11)
    assert (group.group_id, group.ordinal, group.oldest_version) == (11, 7, 2)
    assert group.rollouts[0].text == "text"


def test_an_aborted_completion_makes_the_group_unusable() -> None:
    assert not sheaf_with([-0.5], finish_reason="abort").usable
