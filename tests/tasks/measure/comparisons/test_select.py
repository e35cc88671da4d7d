"""The table of selections, on a tiny target and an uneven pool of two domains."""

import math
from pathlib import Path

import pytest
import torch

from tasks.measure.comparisons import Bench, select
from tests.tasks.measure.benches import counting

pytestmark = pytest.mark.slow

ROWS = {row.name: row for row in select.rows(1)}


@pytest.fixture
def bench(tiny_target: Path, tmp_path: Path) -> Bench:
    domains = {"fives": counting(5, 40, 16), "threes": counting(3, 40, 16)}
    return Bench(tiny_target, domains, domains, budget=0.25, work_dir=tmp_path)


@pytest.mark.parametrize("name", ["random", "entropy", "acceptance_gap"])
def test_a_row_fills_all_columns(bench: Bench, name: str) -> None:
    small = ROWS[name]._replace(settings={**ROWS[name].settings, "model_layers": 1})  # the target has two layers
    figures = select.measure(bench, small, seed=0)
    assert figures.keys() == select.COLUMNS.keys()
    assert all(math.isfinite(value) for value in figures.values())
    assert 0 < figures["acceptance"] <= 1
    assert figures["tokens"] == 6 * 16


def test_of_eight_documents_in_the_pool_one_is_rare(bench: Bench) -> None:
    pool, rare = select._pool(bench, torch.Generator().manual_seed(0))
    assert len(pool) == 24 and len(rare) == 3
    threes = {tuple(document) for document in bench.train["threes"]}
    assert rare == {place for place, document in enumerate(pool) if tuple(document) in threes}
