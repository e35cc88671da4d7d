"""The table of draft families: every trained family has a row, and is trained in the one loop as it says."""

from pathlib import Path

import pytest

from models.core.drafting.draft_families import family_named, is_trained
from tasks.measure import lesson
from tasks.measure.comparisons import Row, drafts
from tests.tasks.measure.benches import bench_of

SMALLER = {"lm": {"num_layers": 1}}  # than the two layers of the target


def test_every_trained_family_has_a_row() -> None:
    names = [row.name for row in drafts.rows(1.0)]
    assert {"clover", "eagle", "eagle3", "hydra", "lm", "medusa"} <= set(names)
    assert all(is_trained(family_named(name)) for name in names)
    assert drafts.BASELINE in names


@pytest.mark.slow
@pytest.mark.parametrize("row", drafts.rows(0.05), ids=lambda row: row.name)
def test_a_row_has_all_columns(row: Row, tiny_target: Path, tmp_path: Path) -> None:
    draft = {**row.settings["draft"], **SMALLER.get(row.name, {})}
    row = row._replace(settings={**row.settings, "draft": draft, "num_epochs": 1})
    found = drafts.measure(bench_of(tiny_target, tmp_path, end=259), row, seed=3)
    assert found.keys() == drafts.COLUMNS.keys()
    assert found["parameters_m"] > 0
    assert all(1 <= float(found[name]) <= 1 + lesson.NUM_DRAFT_TOKENS for name in ("tau", "tau_sampled"))
