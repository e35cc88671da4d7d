import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

from models.core.learning import training
from models.shrink import sheared
from tasks.measure.comparisons import Bench, Row, shrink
from tests.tasks.measure.benches import random_texts

pytestmark = pytest.mark.slow

ROWS = {row.name: row for row in shrink.rows(0.05)}


@pytest.fixture
def bench(tiny_target: Path, tmp_path: Path) -> Bench:
    train, held_out = (random_texts(number, 40, ("chat", "code"), 120, seed) for seed, number in enumerate((12, 4)))
    return Bench(tiny_target, train, held_out, 0.05, tmp_path)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_has_all_columns_and_is_no_larger_than_the_target(bench: Bench, row: Row) -> None:
    figures = shrink.measure(bench, row, seed=0)
    assert figures.keys() == shrink.COLUMNS.keys()
    # Million: 259 · 128 of the embedding, two blocks of 147,712, and the last norm's 128.
    assert figures["parameters_m"] == 0.328_704 or not row.name.startswith("full")
    assert figures["parameters_m"] < 0.328_704 or row.name.startswith("full")
    assert figures["perplexity"] > 1 and 0 < figures["coverage"] <= 1
    assert (figures["coverage"] < 1) == (row.name == "vocabulary") == math.isnan(figures["error"])
    assert math.isnan(figures["seconds"]) == (row.name == "full") == (figures["error"] == 0)


@pytest.mark.parametrize("name", ["depth", "width"])
def test_the_control_keeps_exactly_as_much_as_its_partner_and_draws_what(name: str, bench: Bench) -> None:
    chosen = shrink.measure(_own(bench), ROWS[name], seed=0)
    drawn = [shrink.measure(_own(bench), ROWS[f"{name}, by lot"], seed=seed) for seed in range(4)]
    assert {figures["parameters_m"] for figures in drawn} == {chosen["parameters_m"]}
    assert len({figures["error"] for figures in drawn}) > 1


def test_chains_keep_what_their_first_stage_made(bench: Bench) -> None:
    chained = {name: shrink.measure(_own(bench), ROWS[name], seed=0) for name in shrink.CHAINS}
    assert chained["low_rank 0.8, then lora"]["promised"] == 14  # layers, all of which have a rank
    low_rank, depth = (shrink.measure(_own(bench), ROWS[name], seed=0) for name in ("low_rank 0.8", "depth"))
    assert chained["low_rank 0.8, then lora"]["parameters_m"] == low_rank["parameters_m"]
    assert chained["depth, then qat"]["parameters_m"] == depth["parameters_m"]
    assert math.isnan(chained["depth, then qat"]["promised"]) and chained["depth, then qat"]["rate"] == 3e-4


def test_what_trains_as_sheared_does_learns_from_as_many_tokens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    learnt = []
    real = training.train

    def counted(*args: Any, **settings: Any) -> training.Trained:
        trained = real(*args, **settings)
        learnt.append(trained.num_tokens)
        return trained

    monkeypatch.setattr(training, "train", counted)
    monkeypatch.setattr(sheared, "train", counted)
    totals = []
    for name in ("sheared", "width, trained as sheared"):
        learnt.clear()
        shrink.measure(_own(bench), ROWS[name], seed=0)
        totals.append(sum(learnt))
    assert totals[0] == totals[1] > 12 * 40


def _own(bench: Bench) -> Bench:
    return bench._replace(work_dir=Path(tempfile.mkdtemp(dir=bench.work_dir)))
