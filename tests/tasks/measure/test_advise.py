"""Advice on the two-layer target: what is seen, what is expected of it, and the recipe that comes of it."""

import math
import time
import tomllib
from pathlib import Path

import pytest

from models.core.throughput.expected import Costs, DraftingCost, Option, Seen, Step, ranked
from models.recipe import toml
from tasks.measure import advise
from tasks.measure.advise import PLAIN, ROWS, SIZES, Row, _seen, is_cut, make_report, ways_of
from tasks.measure.cells import Cells
from tasks.measure.configurations import Target
from tasks.measure.run import Bar
from tests.tasks.measure.benches import open_target

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 10, 11, 12], [20, 21, 20, 21, 20]]
MAX_TOKENS = 12
WAYS = ways_of(3)


@pytest.fixture(scope="module")
def target(tiny_target: Path, tiny_draft: Path) -> Target:
    return open_target(tiny_target, tiny_draft, max_model_len=96)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    return Cells(tmp_path_factory.mktemp("cells"), {})


@pytest.fixture(scope="module")
def rows(target: Target, cells: Cells, bar: Bar) -> dict[str, list[Row]]:
    return advise._see(target, WAYS, PROMPTS, MAX_TOKENS, cells, math.inf, bar)


def test_every_way_is_seen_with_all_its_steps(rows: dict[str, list[Row]]) -> None:
    assert rows.keys() == {PLAIN, *WAYS}
    assert all(row["decoded"][1] > 0 for row in rows[PLAIN])
    for name, way in WAYS.items():
        seen = _seen(rows[name], is_cut(way))
        # The first token of an answer comes with its prompt; its last step may have accepted a token too many.
        beyond = sum(1 + step.accepted for step in seen.steps) - len(PROMPTS) * (MAX_TOKENS - 1)
        assert 0 <= beyond <= len(PROMPTS), name
        assert all(0 <= step.accepted <= step.proposed <= max(SIZES) for step in seen.steps)
        assert min(seen.drafting) >= 0


def test_where_time_is_over_all_ways_are_seen_on_the_same_prompts_and_a_later_run_goes_on(
    target: Target, tmp_path: Path, bar: Bar
) -> None:
    ways, over_s = {name: WAYS[name] for name in list(WAYS)[:2]}, time.monotonic()

    def see(ends_s: float) -> dict[str, int]:
        seen = advise._see(target, ways, PROMPTS, MAX_TOKENS, Cells(tmp_path, {}), ends_s, bar)
        return {name: len(rows) for name, rows in seen.items()}

    def measured(ends_s: float) -> set[int]:
        of_ways = advise._measure(target, ways, PROMPTS, MAX_TOKENS, 0, Cells(tmp_path, {}), ends_s, bar)
        return {row["num_prompts"] for row in of_ways.values()}

    first, second = ways
    assert see(over_s) == {PLAIN: 1, first: 1}  # and no more than that
    kept = [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("seen-0-*.json"))]
    assert see(math.inf) == {PLAIN: 3, first: 3, second: 3}
    assert [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("seen-0-*.json"))][:2] == kept
    (tmp_path / "seen-2-2.json").unlink()
    assert see(over_s) == {PLAIN: 2, first: 2, second: 2}
    assert [measured(over_s), measured(math.inf), measured(over_s)] == [{1}, {3}, {3}]


def test_what_there_was_no_time_for_is_told() -> None:
    seen = {"suffix": Seen([], DraftingCost(0.0))}
    ways = dict.fromkeys(("suffix", "ngram"), WAYS["suffix"])
    measured = {"suffix": {"num_prompts": 2}}
    told = "Of 4 prompts 3 were seen and 2 measured in the time given; not seen yet: ngram."
    assert advise._left(3, 4, measured, ways, seen) == [told, "The same command goes on from there."]
    assert advise._left(4, 4, {"suffix": {"num_prompts": 4}}, ways, seen) == []
    assert advise._left(4, 4, {}, ways, seen) == []  # with times of another machine nothing is measured


@pytest.mark.slow
def test_what_is_seen_and_timed_makes_an_order_and_the_best_are_measured(
    target: Target, rows: dict[str, list[Row]], cells: Cells, bar: Bar
) -> None:
    costs = advise._costs(cells.keep("rows", lambda: advise._rows_ms(target, PROMPTS, ends_s=0.0)), rows[PLAIN])
    assert costs.rows_ms.keys() == {*ROWS}
    assert costs.target_ms(1) + costs.rest_ms >= costs.target_ms(1) > 0
    seen = {name: _seen(rows[name], is_cut(way)) for name, way in WAYS.items()}
    options = ranked(seen, SIZES, costs)
    assert {option.way for option in options} == {*WAYS}
    best = {option.way: advise.sized(WAYS[option.way], option) for option in options[:2]}
    measured = advise._measure(target, best, PROMPTS, MAX_TOKENS, 0, cells, math.inf, bar)
    assert measured.keys() == best.keys()
    assert all(row["num_equal"] == len(PROMPTS) and row["speedup"]["value"] > 0 for row in measured.values())
    report = make_report("tiny", options, seen, WAYS, costs, measured)
    assert report.figures["missed_by"].keys() == best.keys()
    assert len(report.grids[0].rows) == len(WAYS)


def report_of(measured: dict[str, Row], speedup: float = 1.5) -> tuple[list[str], dict[str, float]]:
    seen = {"suffix": Seen([Step(4, 2)], DraftingCost(0.1)), "ngram": Seen([Step(4, 1)], DraftingCost(0.1))}
    options = [Option("suffix", 4, speedup), Option("ngram", 2, 1.2)]
    report = make_report("tiny", options, seen, WAYS, Costs(rows_ms={1: 1.0}), measured)
    return report.notes, report.figures["missed_by"]


def measured_as(suffix: float, ngram: float, num: int = 2) -> dict[str, Row]:
    return {
        name: {"speedup": {"value": value, "low": value, "high": value}, "num_equal": 1, "num_prompts": num}
        for name, value in (("suffix", suffix), ("ngram", ngram))
    }


@pytest.mark.parametrize(
    ("measured", "speedup", "told", "pasted"),
    [
        (measured_as(1.2, 1.3), 1.5, "ngram with K = 2: measured at 1.30× plain decoding.", True),
        ({}, 1.5, "suffix with K = 4: expected at 1.50× plain decoding.", True),  # with times of another machine
        ({}, 0.9, "Don't speculate: the best, suffix with K = 4, is expected at 0.90× plain.", False),
    ],
)
def test_what_is_measured_decides_and_where_nothing_pays_nothing_is_to_be_pasted(
    measured: dict[str, Row], speedup: float, told: str, pasted: bool
) -> None:
    notes, missed_by = report_of(measured, speedup)
    assert notes[0] == told
    assert ("```toml" in notes) == pasted and ('name = "ngram"' in "\n".join(notes)) == bool(measured)
    assert missed_by == (pytest.approx({"suffix": 0.25, "ngram": 1.2 / 1.3 - 1}) if measured else {})


def test_every_way_comes_as_tables_of_a_recipe() -> None:
    for name, way in WAYS.items():
        tables = tomllib.loads(toml(advise.recipe_tables(way, Option(name, 3, 1.0))))
        assert tables["engine"]["name"] == "torch"
        assert tables["engine"]["num_draft_tokens"] == (3 if is_cut(way) else way.engine["num_draft_tokens"])
        assert ("draft" in tables) == (not name.startswith("served"))
