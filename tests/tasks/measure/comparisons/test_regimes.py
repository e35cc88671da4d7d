"""Rows of regimes: what they cost, and what their methods say of themselves."""

import math
from pathlib import Path

import pytest

from tasks.measure.comparisons import Bench, regimes
from tests.tasks.measure.benches import counting

pytestmark = pytest.mark.slow

ROWS = {row.name: row for row in regimes.rows(1)}


@pytest.fixture
def bench(tiny_target: Path, tmp_path: Path) -> Bench:
    text = {"thirds": counting(3, 12, 40), "fifths": counting(5, 12, 40)}
    return Bench(tiny_target, text, text, 0.001, tmp_path)


def test_plain_training_is_a_hundred_percent_and_half_as_long_fifty(bench: Bench) -> None:
    plain, half, again = (regimes.measure(bench, regimes.rows(1)[place], seed=0) for place in (0, 1, 1))
    assert plain.keys() == half.keys() == regimes.COLUMNS.keys()
    assert plain["flops_pct"] == pytest.approx(100) and half["flops_pct"] == pytest.approx(50)
    assert half | {"seconds": 0} == pytest.approx(again | {"seconds": 0}, nan_ok=True)
    assert plain["steps"] == 2 * half["steps"] and plain["skipped_steps"] == 0
    assert plain["peak_mib"] == half["peak_mib"] > 0 and plain["zeroes_pct"] == 0
    assert 0 < plain["loss"] < math.log(60) and 0 <= plain["exit_pct"] <= 100


def test_a_row_shows_what_the_regime_did(bench: Bench) -> None:
    one = regimes.measure(bench, ROWS["iterative_magnitude_random_mask"], seed=1)
    assert one["zeroes_pct"] == pytest.approx(100 * (1 - 0.8**3), abs=0.1)
    assert one["flops_pct"] > 300 and one["skipped_steps"] >= 0


@pytest.mark.parametrize(
    ("name", "own", "above"), [("dorefa", "clipped_share", 0), ("hybrid_bfp", "flushed_share", -1)]
)
def test_a_row_is_scored_as_it_computes_and_in_floats_and_shows_what_its_method_says(
    name: str, own: str, above: float, bench: Bench
) -> None:
    one_epoch = ROWS[name]._replace(settings={**ROWS[name].settings, "num_epochs": 1})
    found = regimes.measure(bench, one_epoch, seed=0)
    assert found["loss"] != found["float_loss"]
    assert above < found[own] < 1 and math.isnan(found["kept_l1"])
