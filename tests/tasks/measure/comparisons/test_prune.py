import math
from pathlib import Path

import numpy as np
import pytest

from models import catalog
from models.drafts import lm
from tasks.measure.comparisons import Bench, prune
from tests.tasks.measure.benches import random_texts

pytestmark = pytest.mark.slow

ROWS = {row.name: row for row in prune.rows(0.1)}
METHODS = (*catalog.names("prune"), prune.CONTROL)


def bench(target: Path, work_dir: Path, num_documents: int = 8, budget: float = 0.1) -> Bench:
    train, held_out = (random_texts(num_documents, 40, ("chat", "code"), seed=seed) for seed in (0, 1))
    return Bench(target, train, held_out, budget, work_dir)


def test_every_method_and_the_control_have_a_row_of_each_pattern_and_the_calibrated_a_curve() -> None:
    names = {f"{name} {pattern}" for name in METHODS for pattern in prune.PATTERNS}
    names |= {f"{name} 2:4, {part}" for name in ("sparsegpt", "wanda") for part in prune.CURVE}
    assert ROWS.keys() == names | {prune.BASELINE}


@pytest.mark.parametrize("pattern", ["50%", "2:4"])
def test_a_row_has_all_columns_and_exactly_as_many_zeroes_as_the_control_which_draws_them(
    pattern: str, tiny_target: Path, tmp_path: Path
) -> None:
    one = bench(tiny_target, tmp_path)
    for method in METHODS:
        figures = prune.measure(one, ROWS[f"{method} {pattern}"], seed=0)
        assert figures.keys() == prune.COLUMNS.keys()
        assert (figures["missed"], math.isnan(figures["tau"])) == (0, True), method
        assert figures["perplexity"] > 1 and figures["kl"] > 0 and figures["agreement_pct"] < 100
        assert figures["seconds"] > 0
    again, other = (prune.measure(one, ROWS[f"{prune.CONTROL} {pattern}"], seed)["kl"] for seed in (0, 1))
    assert figures["kl"] == again != other  # the control is the last of the methods


def test_the_dense_row_is_as_the_target_and_a_few_zeroes_are_about_as_many(tiny_target: Path, tmp_path: Path) -> None:
    dense, few = (prune.measure(bench(tiny_target, tmp_path), ROWS[name], 0) for name in (prune.BASELINE, "wanda 10%"))
    assert (dense["kl"], dense["agreement_pct"]) == (0, 100)
    assert math.isnan(dense["seconds"]) and math.isnan(dense["tau"])
    assert 0 <= few["missed"] < 0.01  # rows of 128


@pytest.mark.parametrize(
    ("name", "share"), [("sparsegpt 50%", 1), *((f"wanda 2:4, {part}", share) for part, share in prune.CURVE.items())]
)
def test_calibration_has_four_tokens_for_each_input_of_the_widest_layer_or_a_share_of_them(
    name: str, share: float, tiny_target: Path, tmp_path: Path
) -> None:
    figures = prune.measure(bench(tiny_target, tmp_path, 40, budget=1.0), ROWS[name], seed=0)
    assert figures["calibrated_tokens"] == share * 4 * 256


def test_a_draft_of_the_target_is_asked_what_it_would_have_guessed(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    lm.save(lm.create(lm.Params(num_layers=1), tiny_target, np.empty(0)), tmp_path / "draft")
    served = bench(tiny_target, tmp_path)._replace(draft_dir=tmp_path / "draft", num_draft_tokens=2)
    assert 1 <= prune.measure(served, ROWS[prune.BASELINE], seed=0)["tau"] <= 3
