"""The tables of arithmetic: each row is a method that exists, compared with float32 of its own seed and width."""

import math
from pathlib import Path

import pytest

from models import catalog
from tasks.measure.comparisons import Bench, Row
from tasks.measure.comparisons.arithmetic import BASELINE, COLUMNS, _float32, measure, rows
from tests.tasks.measure.benches import counting

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tiny_target: Path, tmp_path: Path) -> Bench:
    documents = counting(3, 40, 40)
    texts = {"even": documents[::2], "odd": documents[1::2]}
    held_out = {domain: some[:3] for domain, some in texts.items()}
    return Bench(tiny_target, texts, held_out, budget=0.02, work_dir=tmp_path)


def named(name: str) -> Row:
    return next(row for row in rows(1.0) if row.name == name)


def test_every_row_holds_a_method_that_parses() -> None:
    found = rows(1.0)
    methods = [row.settings["method"] for row in found if row.settings["method"] is not None]
    assert all(catalog.parse("regimes", method).name == method["name"] for method in methods)
    assert all(row.settings["width"] % 4 == 0 for row in found)


def test_float32_has_no_gap_and_few_bits_have_one(bench: Bench) -> None:
    plain, coarse = (measure(bench, named(name), seed=0) for name in (BASELINE, "dorefa-1-1-6"))
    assert plain.keys() == coarse.keys() == COLUMNS.keys()
    assert plain["gap"] == 0 != coarse["gap"] == pytest.approx(coarse["loss"] - plain["loss"])
    assert plain["float_loss"] == plain["loss"] and coarse["float_loss"] != coarse["loss"]
    assert 0 < coarse["clipped_share"] < 1 and math.isnan(coarse["sign_agreement"])


def test_a_row_does_not_hang_on_what_was_measured_before(bench: Bench) -> None:
    row = named("hbfp-8_16-width-64")
    first = measure(bench, row, seed=1)
    _float32.cache_clear()
    measure(bench, named(BASELINE), seed=0)
    second = measure(bench, row, seed=1)
    assert (first["loss"], first["gap"]) == (second["loss"], second["gap"])
    assert measure(bench, row, seed=2)["loss"] != first["loss"]
