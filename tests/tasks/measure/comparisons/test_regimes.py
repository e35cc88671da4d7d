"""Every regime is a row of the table, and a row has every column."""

import math
from pathlib import Path

import pytest

from tasks.measure.comparisons import Bench, regimes
from tests.tasks.measure.benches import counting

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tiny_target: Path, tmp_path: Path) -> Bench:
    text = {"thirds": counting(3, 12, 40), "fifths": counting(5, 12, 40)}
    return Bench(tiny_target, text, text, 0.001, tmp_path)


def test_plain_training_is_a_hundred_percent_and_half_as_long_fifty(bench: Bench) -> None:
    plain, half = (regimes.measure(bench, row, seed=0) for row in regimes.rows(1)[:2])
    assert plain.keys() == half.keys() == regimes.COLUMNS.keys()
    assert plain["flops_pct"] == pytest.approx(100) and half["flops_pct"] == pytest.approx(50)
    again = regimes.measure(bench, regimes.rows(1)[1], seed=0)
    assert half | {"seconds": 0} == pytest.approx(again | {"seconds": 0}, nan_ok=True)
    assert plain["steps"] == 2 * half["steps"] and plain["skipped_steps"] == 0
    assert plain["peak_mib"] == half["peak_mib"] > 0 and plain["zeroes_pct"] == 0
    assert 0 < plain["loss"] < math.log(60) and 0 <= plain["exit_pct"] <= 100


def test_a_row_shows_what_the_regime_did(bench: Bench) -> None:
    rows = {row.name: row for row in regimes.rows(1)}
    row = rows["iterative_magnitude_random_mask"]
    one = regimes.measure(bench, row, seed=1)
    assert one["zeroes_pct"] == pytest.approx(100 * (1 - 0.8**3), abs=0.1)
    assert one["flops_pct"] > 300 and one["skipped_steps"] >= 0


def test_a_row_is_scored_as_it_computes_and_in_floats_and_shows_what_its_method_says(bench: Bench) -> None:
    rows = {row.name: row for row in regimes.rows(1)}
    few = regimes.measure(bench, rows["dorefa"]._replace(settings={**rows["dorefa"].settings, "num_epochs": 1}), seed=0)
    assert few["loss"] != few["float_loss"] and 0 < few["clipped_share"] < 1 and math.isnan(few["kept_l1"])
    blocks = rows["hybrid_bfp"]
    found = regimes.measure(bench, blocks._replace(settings={**blocks.settings, "num_epochs": 1}), seed=0)
    assert found["loss"] != found["float_loss"] and found["flushed_share"] >= 0
