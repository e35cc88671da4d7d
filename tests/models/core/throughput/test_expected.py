import random
from pathlib import Path

import pytest

from models.core.throughput.expected import (
    Costs,
    DraftingCost,
    Option,
    Seen,
    Step,
    acceptance_by_place,
    expected_speedup,
    ranked,
    read_costs,
)

COSTS = Costs(rows_ms={1: 10.0, 4: 13.0, 8: 25.0}, rest_ms=2.0)


def test_times_between_and_beyond_the_known_rows_lie_on_straight_lines() -> None:
    assert [COSTS.target_ms(rows) for rows in (1, 2, 4, 6, 8, 10)] == [10.0, 11.0, 13.0, 19.0, 25.0, 31.0]
    assert Costs(rows_ms={1: 7.0}).target_ms(9) == 7.0


def test_a_speed_by_hand() -> None:
    seen = Seen([Step(3, 3), Step(3, 0)], DraftingCost(1.0, 0.5))
    # Two steps of T(4) + 2 ms of drafting + 2 ms of rest bring 5 tokens; a plain token takes 12 ms.
    assert expected_speedup(seen, 3, COSTS, "a") == pytest.approx(5 / (2 * (13 + 2 + 2)) * 12)
    assert expected_speedup(seen, 1, COSTS, "a") == pytest.approx(3 / (2 * (11 + 1 + 2)) * 12)


def test_a_way_takes_the_times_that_were_brought_along_for_it() -> None:
    seen = Seen([Step(3, 3)], DraftingCost(100.0))
    brought = COSTS.model_copy(update={"draft_ms": {"a": DraftingCost(0.0)}})
    assert expected_speedup(seen, 3, brought, "a") == pytest.approx(4 / 15 * 12)
    assert expected_speedup(seen, 3, brought, "b") < 0.5


def test_the_best_number_of_tokens_is_found_and_what_can_not_be_cut_is_left() -> None:
    first_only = [Step(8, 1)] * 10
    seen = {
        "cut": Seen(first_only, DraftingCost(0.0)),
        "tree": Seen(first_only, DraftingCost(0.0), cut=False),
        "never": Seen([Step(0, 0)] * 10, DraftingCost(0.0)),
    }
    best = ranked(seen, (1, 2, 4, 8), COSTS)
    assert [(one.way, one.num_draft_tokens) for one in best] == [("cut", 1), ("never", 1), ("tree", 8)]
    assert best[0] == Option("cut", 1, pytest.approx(2 / 13 * 12))
    assert best[1].speedup == pytest.approx(1.0)


def test_what_is_expected_of_fewer_tokens_is_what_a_draft_of_known_acceptance_gives() -> None:
    """Tokens are accepted independently, with chance 0.7: cutting a chain of 8 must tell what chains of 1 to 6 give."""
    rng = random.Random(0)

    def steps(most: int, number: int) -> list[Step]:
        return [Step(most, next((n for n in range(most) if rng.random() > 0.7), most)) for _ in range(number)]

    long = Seen(steps(8, 20_000), DraftingCost(1.0, 1.0))
    for most in (1, 3, 6):
        truth = expected_speedup(Seen(steps(most, 20_000), DraftingCost(1.0, 1.0)), most, COSTS, "a")
        assert expected_speedup(long, most, COSTS, "a") == pytest.approx(truth, rel=0.02)


def test_acceptance_by_place_ends_with_the_last_that_was_accepted() -> None:
    assert acceptance_by_place([Step(4, 2), Step(4, 0), Step(4, 1), Step(0, 0)]) == [0.5, 0.25]
    assert acceptance_by_place([]) == []


def test_a_table_is_written_and_read(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(COSTS.model_copy(update={"draft_ms": {"a": DraftingCost(1.0, 2.0)}}).model_dump_json())
    assert read_costs(file).draft_ms["a"].ms(3) == 5.0
    assert read_costs(file).target_ms(2) == 11.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ("{}", "rows_ms"),
        ('{"rows_ms": {"2": 1.0}}', "must tell what 1 row takes"),
        ('{"rows_ms": {"1": 0}}', r"rows_ms.1: .*greater than 0"),
        ('{"rows_ms": {"1": 1}, "draft_ms": {"a": [-1]}}', r"draft_ms.a.*: .*greater than or equal to 0"),
        ('{"rows_ms": {"1": 1}, "speed": 3}', "speed"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_file(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=told) as refused:
        read_costs(file)
    assert str(file) in str(refused.value)
    with pytest.raises(ValueError, match="none.json can.t be read"):
        read_costs(tmp_path / "none.json")
