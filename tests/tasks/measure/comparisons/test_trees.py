"""The table of trees: every tree has a row, drafts as it says, and changes no output."""

from pathlib import Path

import pytest

from models import catalog
from tasks.measure.comparisons import Row, trees
from tests.tasks.measure.benches import bench_of


def test_every_tree_has_a_row_of_each_size() -> None:
    names = [row.name for row in trees.rows(1.0)]
    assert names == [f"{name}, {size} tokens" for size in trees.NUM_TOKENS for name in catalog.names("trees")]
    assert trees.BASELINE in names


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in trees.rows(1.0) if "12" in row.name], ids=lambda row: row.name)
def test_a_row_keeps_to_its_budget_and_to_the_targets_output(
    row: Row, tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    found = trees.measure(bench_of(tiny_target, tmp_path, tiny_draft), row, seed=0)
    assert found.keys() == trees.COLUMNS.keys()
    assert found["equal_pct"] + found["near_tie_pct"] == 100
    assert found["speedup"] > 0 and found["draft_ms"] > 0 and found["target_ms"] > 0
    assert 1 <= found["tau"] <= 1 + found["passes"]
    assert found["rows"] <= 13
    tree = catalog.load("trees", row.settings["engine"]["trees"]["name"])
    if hasattr(tree, "shape"):
        shape = tree.shape(12, tree.Params())
        assert (found["rows"], found["passes"]) == (1 + len(shape.parents), len(shape.levels))
