"""What the throughput benchmark makes of its numbers."""

from hypothesis import given
from hypothesis import strategies as st

from analysis.bench_vllm_throughput import ratio_best, split, table
from analysis.engine_process import Job, captured
from asyncrl.config import VllmEngineConfig


def row(kind, num, rate, *, engines=1, shape="1.4b", variant="base"):
    return {
        "shape": shape, "kind": kind, "variant": variant, "engines": engines, "num": num,
        "seeded": kind == "ours", "tokens_per_s": rate,
    }  # fmt: skip


@given(num=st.integers(1, 5000), engines=st.integers(1, 8))
def test_completions_are_split_evenly_and_none_is_lost(num, engines):
    parts = split(num, engines)
    assert sum(parts) == num
    assert len(parts) == engines
    assert max(parts) - min(parts) <= 1


def test_the_ratio_is_our_best_at_the_largest_n_over_the_best_plain_rate_at_any():
    rows = [
        row("plain", 512, 30), row("plain", 1024, 24), row("ours", 1024, 45, engines=2),
        row("ours", 1024, 75, engines=4), row("ours", 512, 99, engines=4),
        row("ours", 1024, 200, variant="fp8"), row("ours", 1024, 300, shape="135m"),
    ]  # fmt: skip
    assert ratio_best(rows) == 2.5  # 75 / 30
    assert ratio_best(rows[:2]) is None
    assert ratio_best(rows[2:]) is None


def test_the_table_keeps_what_was_not_measured_empty():
    rows = [row("plain", 512, 30), row("ours", 1024, 45, engines=2)]
    assert [line.split() for line in table(rows).splitlines()] == [
        ["shape", "variant", "engines", "512", "1024"],
        ["1.4b", "base", "plain", "30"],
        ["1.4b", "base", "2", "45"],
    ]


def captured_by(kind, variant, *batches):
    job = Job(
        kind=kind, model="m", variant=variant, engines=1, max_num=1024, batches=list(batches),
        prompt_tokens=64, tokens=256, memory=0.5, eager=False,
    )  # fmt: skip
    config = VllmEngineConfig(
        max_concurrent_completions=1024, max_prompt_tokens=64, max_completion_tokens=256
    )
    return captured(job, config)


def test_the_graphs_are_those_that_the_batches_are_padded_to():
    # 21 -> 24, 171 -> 176, 341 -> 352 (by sixteens from 256), 683 -> 704 (by 32 from 512); and the
    # largest: of 1,344 tokens the last of 1,025 sequences has 320, the context; of 1,408 it had 384.
    assert captured_by("ours", "base", 21, 171, 341, 1024) == [24, 176, 352, 1024, 1344]
    assert captured_by("ours", "base", 21, 683) == [24, 704, 1344]
    # vLLM's own end at 512.
    for kind, variant in (("ours", "graphs512"), ("plain", "base")):
        assert captured_by(kind, variant, 21, 171, 341, 1024) == [24, 176, 352, 512]
