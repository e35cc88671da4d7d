"""The table of length policies: every policy has a row, keeps to its limit, and changes no output."""

from pathlib import Path

import pytest

from models import catalog
from tasks.measure.comparisons import Row, lengths
from tests.tasks.measure.benches import bench_of


def test_every_policy_has_a_row_and_fixed_lengths_have_more() -> None:
    names = [row.name for row in lengths.rows(1.0)]
    assert {f"{name}, at most {lengths.LIMIT}" for name in catalog.names("lengths")} < set(names)
    assert {"fixed, at most 1", "fixed, at most 3", lengths.BASELINE} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize("row", lengths.rows(1.0), ids=lambda row: row.name)
def test_a_row_keeps_to_its_limit_and_to_the_targets_output(
    row: Row, tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    found = lengths.measure(bench_of(tiny_target, tmp_path, tiny_draft), row, seed=0)
    assert found.keys() == lengths.COLUMNS.keys()
    assert found["equal_pct"] + found["near_tie_pct"] == 100
    assert found["speedup"] > 0 and found["target_ms"] > 0
    limit = row.settings["engine"]["num_draft_tokens"]
    assert 1 <= found["rows"] <= 1 + limit
    if row.settings["engine"]["lengths"]["name"] == "fixed":
        assert (found["rows"], found["passes"]) == (1 + limit, limit)
