"""The number of engines that is chosen from measured steps."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import RunConfig
from asyncrl.generator.choice import COUNTS, Option, choose, rows_each, settled, table
from asyncrl.generator.probe import covered

MS = 1e-3


def options(*steps: tuple[float, float], completions: int = 1200) -> list[Option]:
    """One for each (wall ms, busy ms), for 1, 2, ... engines."""
    return [
        Option(engines=n, rows=completions // n, wall_s=wall * MS, busy_s=busy * MS)
        for n, (wall, busy) in enumerate(steps, 1)
    ]


def refused(option: Option, why: str) -> Option:
    return Option(engines=option.engines, rows=option.rows, obstacle=why)


def test_a_host_bound_engine_gets_company_until_the_gpu_is_full() -> None:
    found = options((40, 8), (20, 7), (14, 6), (11, 6))
    # 1200 tokens in max(40, 8), max(20, 14), max(14, 18), max(11, 24) ms.
    rates = [30_000, 60_000, 1200 / (18 * MS), 50_000]
    assert [option.rate for option in found] == pytest.approx(rates)
    choice = choose(found)
    assert choice.engines == 3  # 66,667: 11 % over two engines
    assert choice.sentence == (
        "engine.engines_per_gpu=3: 66,667 tokens/s predicted, 2.22 times one engine; "
        "4 would give -25%"
    )


def test_one_more_engine_must_gain_a_tenth() -> None:
    def second(wall_ms: float) -> int:
        return choose(options((11, 1), (wall_ms, 1))).engines

    assert second(10.01) == 1  # 11 / 10.01 = 1.0989
    assert second(9.99) == 2  # 1.1011


def test_small_steps_that_add_up_are_taken_together() -> None:
    """Each engine gains 9 % on the one before, the third 19 % on the first: three against one."""
    assert choose(options((119, 1), (109, 1), (100, 1))).engines == 2  # 109 / 100 is within a tenth
    assert choose(options((121, 1), (119, 1), (100, 1))).engines == 3


def test_a_gpu_that_is_busy_already_keeps_one_engine() -> None:
    choice = choose(options((20, 19), (11, 10.5), (8, 7.5), (6, 5.5)))
    assert choice.engines == 1
    assert "predicted; 2 would give -5%" in choice.sentence  # 2 * 10.5 = 21 against 20


def test_what_cannot_be_had_is_not_chosen_and_is_said() -> None:
    found = options((40, 4), (20, 4), (13, 4), (10, 4))
    found[2:] = [refused(option, "no room") for option in found[2:]]
    choice = choose(found)
    assert choice.engines == 2
    assert choice.sentence.endswith("2.00 times one engine; 3 cannot be had: no room")


def test_one_engine_must_be_possible() -> None:
    with pytest.raises(ValueError, match="one engine"):
        choose([refused(options((1, 1))[0], "no")])
    with pytest.raises(ValueError, match="one engine"):
        choose(options((1, 1), (1, 1))[1:])


steps = st.tuples(st.floats(0.1, 100), st.floats(0.01, 1)).map(lambda s: (s[0], s[0] * s[1]))


@given(st.lists(steps, min_size=1, max_size=4), st.sets(st.integers(2, 4)))
def test_the_choice_is_the_fewest_engines_within_a_tenth_of_the_best(
    walls: list[tuple[float, float]], impossible: set[int]
) -> None:
    found = [refused(o, "x") if o.engines in impossible else o for o in options(*walls)]
    choice = choose(found)
    possible = {o.engines: o.rate for o in found if not o.obstacle}
    best = max(possible.values())
    assert possible[choice.engines] >= best / 1.1 - 1e-6
    assert all(rate < best / 1.1 + 1e-6 for n, rate in possible.items() if n < choice.engines)


def config(**sections: object) -> RunConfig:
    engine = {"kind": "vllm", "engines_per_gpu": "auto", "max_concurrent_completions": 100}
    tree = {"model": {"path": "m"}, "task": {"kind": "repeat_letter"}, "engine": engine}
    return RunConfig.model_validate(tree | sections)


def test_completions_are_divided_in_whole_groups() -> None:
    # 100 / n / 8 groups, rounded up: 13, 7, 5, 4 of them; and never more than 100.
    assert [rows_each(config(), n) for n in COUNTS] == [100, 56, 40, 32]


def test_an_engine_keeps_room_for_an_evaluation_prompt() -> None:
    assert rows_each(config(eval={"samples_per_prompt": 64}), 4) == 64


def test_the_settled_run_differs_in_the_engines_and_their_completions_alone() -> None:
    before = config()
    after = settled(before, {"engines": 3})
    assert (after.num_engines, after.engine.max_concurrent_completions) == (3, 40)
    assert not after.must_probe
    engine = {"engines_per_gpu": "auto", "max_concurrent_completions": 100}
    assert after.engine.model_copy(update=engine) == before.engine
    assert after.model_copy(update={"engine": before.engine}) == before


def test_the_record_is_json_and_settles_a_run() -> None:
    record = json.loads(json.dumps(choose(options((40, 4), (20, 4))).record()))
    assert settled(config(), record).num_engines == 2
    assert [row["rate"] for row in record["options"]] == pytest.approx([30_000, 60_000])


def test_the_table_has_a_line_for_each_option_with_its_obstacle() -> None:
    found = options((40, 4), (20, 4))
    lines = table([found[0], refused(found[1], "no room")]).splitlines()
    assert lines[1].split() == ["1", "1200", "40.00", "4.00", "30,000"]
    assert lines[2].endswith("no room")


def test_covered_time_counts_what_overlaps_once() -> None:
    # [0, 2] + [3, 7], the second made of three.
    assert covered([(4, 5), (0, 2), (3, 6), (5, 7), (3, 3)]) == 6
    assert covered([]) == 0
