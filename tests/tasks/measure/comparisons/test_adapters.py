"""The table of adapters, on a tiny target and two domains that count differently."""

import math
from pathlib import Path

import pytest

from tasks.measure.comparisons import Bench, Row, adapters
from tests.tasks.measure.benches import counting

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tiny_target: Path, tmp_path: Path) -> Bench:
    domains = {"fives": counting(5, 12, 24), "threes": counting(3, 12, 24)}
    return Bench(tiny_target, domains, domains, budget=0.5, work_dir=tmp_path)


@pytest.mark.parametrize("row", [row for row in adapters.rows(1) if row.name != "base"], ids=lambda row: row.name)
def test_each_row_learns_the_domain_and_fills_all_columns(bench: Bench, row: Row) -> None:
    base = next(row for row in adapters.rows(1) if row.name == adapters.BASELINE)
    untouched = adapters.measure(bench, base, seed=0)
    assert untouched.keys() == adapters.COLUMNS.keys()
    figures = adapters.measure(bench, row, seed=0)
    assert figures.keys() == adapters.COLUMNS.keys()
    assert all(math.isfinite(value) for metric, value in figures.items() if metric != "tau")
    assert figures["kl"] > untouched["kl"] == 0
    assert figures["held_mib"] > 0 and figures["state_mib"] > 0
    assert figures["trained_pct"] <= 100 and figures["saved_mib"] > 0
    # The quantized base starts elsewhere, so losses are compared with a row's own kind in the methods' tests.
    assert figures["loss"] != untouched["loss"]


def test_one_domain_has_no_others_to_forget(bench: Bench) -> None:
    alone = {"fives": bench.train["fives"]}
    figures = adapters.measure(bench._replace(train=alone, held_out=alone), adapters.rows(1)[0], seed=0)
    assert math.isnan(figures["other_loss"]) and math.isfinite(figures["loss"])
