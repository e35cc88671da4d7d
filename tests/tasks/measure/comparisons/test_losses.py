"""The table of losses: every loss has a row, and training makes a draft accept more under the same conditions."""

from pathlib import Path

import pytest

from tasks.measure import lesson
from tasks.measure.comparisons import Row, losses
from tests.tasks.measure.benches import bench_of


@pytest.mark.slow
def test_a_row_has_all_columns_and_the_same_seed_gives_the_same(tiny_target: Path, tmp_path: Path) -> None:
    [row] = [row for row in losses.rows(0.05) if row.name == "lk_hybrid"]
    found = [losses.measure(bench_of(tiny_target, tmp_path / str(number), end=259), row, seed=3) for number in (1, 2)]
    for name in ("tau", "tau_sampled"):
        assert float(found[0][name]) == float(found[1][name]), name
        assert 1 <= float(found[0][name]) <= 1 + lesson.NUM_DRAFT_TOKENS
    assert found[0].keys() == losses.COLUMNS.keys()


@pytest.mark.slow
def test_what_is_learnt_is_accepted(tiny_target: Path, tmp_path: Path) -> None:
    bench = bench_of(tiny_target, tmp_path / "long", end=259)
    longer = Row(
        "forward_kl", {"draft": lesson.HEAD, "loss": {"name": "forward_kl"}, **lesson.TRAINING, "num_epochs": 60}
    )
    shorter = Row("forward_kl", {**longer.settings, "num_epochs": 1})
    after = losses.measure(bench, longer, seed=0)["tau"]
    before = losses.measure(bench._replace(work_dir=tmp_path / "short"), shorter, seed=0)["tau"]
    assert after > before + 0.1
