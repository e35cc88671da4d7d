import math
from pathlib import Path

import numpy as np
import pytest

from models import catalog
from models.drafts import lm
from tasks.measure.comparisons import Bench, prune
from tests.tasks.measure.benches import Texts, random_texts

pytestmark = pytest.mark.slow


def texts(count: int, seed: int) -> Texts:
    return random_texts(count, 40, ("chat", "code"), seed=seed)


def test_every_row_has_all_columns_and_the_sparsity_that_was_asked_for(tiny_target: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_target, texts(8, 0), texts(8, 1), 0.1, tmp_path)
    rows = {row.name: row for row in prune.rows(0.1)}
    # Four patterns, the control too, and two points of the curve of each of two methods that are calibrated.
    assert prune.BASELINE in rows and len(rows) == 1 + 4 * (1 + len(catalog.names("prune"))) + 2 * 2
    for name, row in rows.items():
        figures = prune.measure(bench, row, seed=0)
        assert figures.keys() == prune.COLUMNS.keys()
        dense = name == prune.BASELINE
        assert figures["perplexity"] > 1 and (figures["kl"] == 0) == (figures["agreement_pct"] == 100) == dense
        assert dense or figures["missed"] < 0.01  # rows of 128
        assert math.isnan(figures["seconds"]) == dense and math.isnan(figures["tau"])


@pytest.mark.parametrize(
    ("name", "share"),
    [("sparsegpt 50%", 1), ("wanda 2:4, a quarter of the text", 1 / 4), ("wanda 2:4, half of the text", 1 / 2)],
)
def test_calibration_has_four_tokens_for_each_input_of_the_widest_layer_or_a_share_of_them(
    name: str, share: float, tiny_target: Path, tmp_path: Path
) -> None:
    bench = Bench(tiny_target, texts(40, 0), texts(2, 1), 1.0, tmp_path)
    row = next(row for row in prune.rows(1.0) if row.name == name)
    assert prune.measure(bench, row, seed=0)["calibrated_tokens"] == share * 4 * 256


@pytest.mark.parametrize("pattern", ["50%", "2:4"])
def test_the_control_has_exactly_as_many_zeroes_as_its_partners_and_others_under_another_seed(
    pattern: str, tiny_target: Path, tmp_path: Path
) -> None:
    bench = Bench(tiny_target, texts(8, 0), texts(8, 1), 0.1, tmp_path)
    rows = {row.name: row for row in prune.rows(0.1)}
    for name in (*catalog.names("prune"), prune.CONTROL):
        assert prune.measure(bench, rows[f"{name} {pattern}"], seed=0)["missed"] == 0, name
    control = rows[f"{prune.CONTROL} {pattern}"]
    once, other = (prune.measure(bench, control, seed)["kl"] for seed in (0, 1))
    assert once == prune.measure(bench, control, seed=0)["kl"] != other


def test_a_draft_of_the_target_is_asked_what_it_would_have_guessed(tiny_target: Path, tmp_path: Path) -> None:
    draft = lm.create(lm.Params(num_layers=1), tiny_target, np.empty(0))
    draft_dir = tmp_path / "draft"
    draft_dir.mkdir()
    lm.save(draft, draft_dir)
    bench = Bench(tiny_target, texts(8, 0), texts(8, 1), 0.1, tmp_path, draft_dir, 2)
    assert 1 <= prune.measure(bench, prune.rows(1.0)[0], seed=0)["tau"] <= 3
