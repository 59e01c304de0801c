"""What a verdict says, and what it must not say."""

from asyncrl.sweep.verdict import judge

OFFSETS = {0: -0.3, 1: 0.1, 2: 0.2}
"""What a seed does to every run of it."""


def row(k: int, seed: int, score: float, outcome: str = "done", cause: str = "") -> dict:
    return {
        "variant": "v", "k": k, "seed": seed, "outcome": outcome, "cause": cause, "final": score,
        "area_samples": score,
    }  # fmt: skip


def rows_of(means: dict[int, float], wiggle: float = 0.001) -> list[dict]:
    """Three seeds; `wiggle` makes the differences spread by some thousandths."""
    return [
        row(k, seed, mean + offset + wiggle * ((seed * 7 + k * 3) % 5))
        for k, mean in means.items()
        for seed, offset in OFFSETS.items()
    ]


def sentence(rows: list[dict], ks: tuple[int, ...]) -> str:
    planned = [("v", k, seed) for k in ks for seed in OFFSETS]
    return judge(rows, planned)[0].sentence


def test_seeds_are_paired_so_that_their_own_differences_hide_nothing() -> None:
    """Scores of one k range over 0.5, and a fall of 0.03 is seen."""
    said = sentence(rows_of({0: 0.9, 2: 0.9, 8: 0.87}), (0, 2, 8))
    assert "k <= 2 is not distinguishable from k = 0 at this size (3 seeds; a fall of 0.0" in said
    # 8: differences -0.030 + 0.001 * {4 - 0, 1 - 2, 3 - 4}: mean -0.0293, s 0.0029; t 4.303.
    assert "k = 8 is worse by 0.029 +- 0.007" in said


def test_a_middle_k_alone_is_a_remark_and_no_claim() -> None:
    said = sentence(rows_of({0: 0.9, 2: 0.5, 8: 0.9}), (0, 2, 8))
    assert "k <= 8 is not distinguishable" in said
    assert "k = 2 alone would lie below by 0.4" in said
    assert "worse" not in said


def test_a_gain_is_said_to_be_one() -> None:
    assert "k = 8 is better by 0.2" in sentence(rows_of({0: 0.5, 8: 0.7}), (0, 8))


def test_a_failed_k_is_named_with_its_cause_and_not_judged() -> None:
    rows = rows_of({0: 0.9, 2: 0.9, 8: 0.1})
    rows[3:4] = [row(2, 0, 0.0, "failed", "learner: NonFiniteLossError")]
    said = sentence(rows, (0, 2, 8))
    assert "k = 2 is not judged (1 of 3 runs failed: learner: NonFiniteLossError)" in said
    assert "k = 8 is worse by 0.799 +- 0.007" in said
    assert "not distinguishable" not in said


def test_an_open_k_above_a_failed_one_does_not_vouch_for_it() -> None:
    rows = rows_of({0: 0.9, 2: 0.9, 8: 0.9})
    rows[3:4] = [row(2, 0, 0.0, "failed", "x")]
    said = sentence(rows, (0, 2, 8))
    assert "k = 8 is not distinguishable" in said
    assert "k <= 8" not in said


def test_without_the_baseline_nothing_is_judged() -> None:
    rows = rows_of({0: 0.9, 8: 0.1})[1:]
    (found, _) = judge(rows, [("v", k, seed) for k in (0, 8) for seed in OFFSETS])
    assert [(c.status, c.interval) for c in found.comparisons] == [("missing", None)]
    assert "no verdict, because of k = 0: 1 of 3 runs are missing" in sentence(rows, (0, 8))


def test_missing_runs_are_missing_and_not_fewer_seeds() -> None:
    said = sentence(rows_of({0: 0.9, 8: 0.1})[:-1], (0, 8))
    assert "k = 8 is not judged (1 of 3 runs are missing)" in said


def test_two_seeds_are_too_few() -> None:
    rows = [r for r in rows_of({0: 0.9, 8: 0.1}) if r["seed"] < 2]
    planned = [("v", k, seed) for k in (0, 8) for seed in (0, 1)]
    (final, over_training) = judge(rows, planned)
    assert "no verdict: 2 seeds at k = 8, 3 are needed" in final.sentence
    assert over_training.endpoint == "area_samples"
    assert final.comparisons[0].interval is None


def test_one_k_is_nothing_to_compare() -> None:
    assert "only k = 0" in sentence(rows_of({0: 0.9}), (0,))


def test_variants_are_judged_apart() -> None:
    rows = rows_of({0: 0.9, 8: 0.1}) + [r | {"variant": "w"} for r in rows_of({0: 0.9, 8: 0.9})]
    planned = [(v, k, seed) for v in ("v", "w") for k in (0, 8) for seed in OFFSETS]
    found = {(e.variant, e.endpoint): e.comparisons[0].status for e in judge(rows, planned)}
    assert found == {
        ("v", "final"): "worse", ("v", "area_samples"): "worse",
        ("w", "final"): "open", ("w", "area_samples"): "open",
    }  # fmt: skip
