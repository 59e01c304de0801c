"""What a verdict says, and what it must not say."""

from asyncrl.sweep.verdict import judge

OFFSETS = {0: -0.3, 1: 0.1, 2: 0.2}
"""What a seed does to every run of it."""


def row(k: int, seed: int, score: float, outcome: str = "done", cause: str = "") -> dict:
    """A run whose tokens were all as old as k lets them be."""
    return {
        "variant": "v", "k": k, "seed": seed, "outcome": outcome, "cause": cause, "final": score,
        "area_samples": score, "staleness": {"mean": float(k), "max": k},
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
    assert "no verdict: k = 8 has 2 seeds and at least 3 are needed." in final.sentence
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


def test_a_k_that_the_runs_did_not_come_near_is_named_with_the_staleness_they_had() -> None:
    rows = rows_of({0: 0.9, 2: 0.9, 4: 0.9, 8: 0.1})
    ages = {2: (1.5, 2), 4: (2.8, 4), 8: (2.0, 3)}
    for r in rows:
        if r["k"] in ages:
            mean, oldest = ages[r["k"]]
            # Means of the seeds 0, 1, 2 differ by 0.3 around the one above; only seed 2 has the oldest.
            r["staleness"] = {
                "mean": mean + 0.3 * (r["seed"] - 1), "max": oldest if r["seed"] == 2 else 1
            }  # fmt: skip
    said = sentence(rows, (0, 2, 4, 8))
    # Three quarters of 2 are 1.5, which is reached; of 4 they are 3.0, of 8 they are 6.0.
    assert said.endswith(
        "; realized staleness at k = 4: 2.8 on average, 4 at most"
        "; realized staleness at k = 8: 2.0 on average, 3 at most."
    )
    assert said.count("realized") == 2
    assert "k <= 4 is not distinguishable" in said  # the rule does not look at it
    assert "k = 8 is worse by" in said
    assert "realized" not in sentence(rows_of({0: 0.9, 8: 0.9}), (0, 8))


def test_runs_without_a_trained_token_have_no_realized_staleness() -> None:
    rows = rows_of({0: 0.9, 8: 0.9})
    for r in rows:
        r["staleness"] = {"mean": None, "max": None}
    assert "realized" not in sentence(rows, (0, 8))


def test_a_fall_of_more_than_half_the_baselines_score_excludes_nothing() -> None:
    rows = [row(0, seed, score) for seed, score in enumerate((0.70, 0.78, 0.86))]
    # Differences -0.2, 0, 0.2: mean 0, s 0.2; 4.303 * 0.2 / sqrt(3) = 0.497, above 0.78 / 2.
    wide = [row(4, seed, score) for seed, score in enumerate((0.50, 0.78, 1.06))]
    assert sentence(rows + wide, (0, 4)).endswith(
        "k <= 4 is not distinguishable from k = 0 at this size "
        "(3 seeds; nothing is excluded: a fall of 0.497 from 0.780)."
    )
    # Half of that: 0.248, below 0.39.
    narrow = [row(4, seed, score) for seed, score in enumerate((0.60, 0.78, 0.96))]
    assert sentence(rows + narrow, (0, 4)).endswith("(3 seeds; a fall of 0.248 is not excluded).")
