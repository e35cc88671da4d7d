import math
from pathlib import Path

import pytest
import torch

from tasks.measure.comparisons import Bench, prune

pytestmark = pytest.mark.slow


def texts(count: int, seed: int) -> dict[str, list[list[int]]]:
    rng = torch.Generator().manual_seed(seed)
    return {domain: torch.randint(3, 259, (count, 40), generator=rng).tolist() for domain in ("chat", "code")}


def test_every_row_has_all_columns_and_the_sparsity_that_was_asked_for(tiny_target: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_target, texts(8, 0), texts(8, 1), 0.1, tmp_path)
    rows = {row.name: row for row in prune.rows(0.1)}
    assert prune.BASELINE in rows and len(rows) >= 4
    for name, row in rows.items():
        figures = prune.measure(bench, row, seed=0)
        assert figures.keys() == prune.COLUMNS.keys()
        assert name == "dense" or figures["missed"] < 0.01  # rows of 128
        assert all(figures[f"perplexity_{pattern}"] > 1 for pattern in prune.PATTERNS)
        assert math.isnan(figures["seconds"]) == (name == "dense")
