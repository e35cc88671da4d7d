"""The table of adapters, on a tiny target and two domains that count differently."""

import math
from pathlib import Path

import pytest

from tasks.measure.comparisons import Bench, adapters
from tests.tasks.measure.benches import counting

pytestmark = pytest.mark.slow

ROWS = {row.name: row for row in adapters.rows(1)}


def bench(target: Path, work_dir: Path, *steps: int) -> Bench:
    domains = {f"counts in {step}": counting(step, 12, 24) for step in steps}
    return Bench(target, domains, domains, budget=0.5, work_dir=work_dir)


def test_each_kind_of_row_learns_the_domain_and_fills_all_columns(tiny_target: Path, tmp_path: Path) -> None:
    untouched = adapters.measure(bench(tiny_target, tmp_path, 3, 5), ROWS[adapters.BASELINE], seed=0)
    assert untouched.keys() == adapters.COLUMNS.keys()
    for name in ("full", "lora", "qlora"):
        (tmp_path / name).mkdir()
        figures = adapters.measure(bench(tiny_target, tmp_path / name, 3, 5), ROWS[name], seed=0)
        assert figures.keys() == adapters.COLUMNS.keys()
        assert all(math.isfinite(value) for metric, value in figures.items() if metric != "tau")
        assert figures["kl"] > untouched["kl"] == 0
        assert figures["held_mib"] > 0 and figures["state_mib"] > 0
        assert figures["trained_pct"] <= 100 and figures["saved_mib"] > 0
        # The quantized base starts elsewhere, so losses are compared with a row's own kind in the methods' tests.
        assert figures["loss"] != untouched["loss"]


def test_one_domain_has_no_others_to_forget(tiny_target: Path, tmp_path: Path) -> None:
    figures = adapters.measure(bench(tiny_target, tmp_path, 5), ROWS[adapters.BASELINE], seed=0)
    assert math.isnan(figures["other_loss"]) and math.isfinite(figures["loss"])
