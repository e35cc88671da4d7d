import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from models.core.learning import training
from models.shrink import sheared
from tasks.measure.comparisons import Bench, shrink
from tests.tasks.measure.benches import random_texts

pytestmark = pytest.mark.slow

ROWS = {row.name: row for row in shrink.rows(0.05)}


Measured = Callable[[str, int], dict[str, float]]


@pytest.fixture(scope="module")
def measured(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """What measures a row under a seed, once."""
    train, held_out = (random_texts(number, 40, ("chat", "code"), 120, seed) for seed, number in enumerate((12, 4)))

    @cache
    def measure(name: str, seed: int = 0) -> dict[str, float]:
        bench = Bench(tiny_target, train, held_out, 0.05, tmp_path_factory.mktemp("cell"))
        return shrink.measure(bench, ROWS[name], seed)

    return measure


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_all_columns_and_is_no_larger_than_the_target(name: str, measured: Measured) -> None:
    figures, is_whole = measured(name, 0), name.startswith("full")
    assert figures.keys() == shrink.COLUMNS.keys()
    # Million: 259 · 128 of the embedding, two blocks of 147,712, and the last norm's 128.
    assert (figures["parameters_m"] == 0.328_704) == is_whole and (figures["parameters_m"] < 0.328_704) != is_whole
    assert figures["perplexity"] > 1 and 0 < figures["coverage"] <= 1
    assert (figures["coverage"] < 1) == (name == "vocabulary") == math.isnan(figures["error"])
    assert math.isnan(figures["seconds"]) == (name == "full") == (figures["error"] == 0)


@pytest.mark.parametrize("name", ["depth", "width"])
def test_the_control_keeps_exactly_as_much_as_its_partner_and_draws_what(name: str, measured: Measured) -> None:
    drawn = [measured(f"{name}, by lot", seed) for seed in range(4)]
    assert {figures["parameters_m"] for figures in drawn} == {measured(name, 0)["parameters_m"]}
    assert len({figures["error"] for figures in drawn}) > 1


def test_chains_keep_what_their_first_stage_made(measured: Measured) -> None:
    trained, finetuned = measured("depth, then qat", 0), measured("low_rank 0.8, then lora", 0)
    assert finetuned["promised"] == 14  # layers, all of which have a rank
    assert finetuned["parameters_m"] == measured("low_rank 0.8", 0)["parameters_m"]
    assert trained["parameters_m"] == measured("depth", 0)["parameters_m"]
    assert math.isnan(trained["promised"]) and trained["rate"] == 3e-4


def test_what_trains_as_sheared_does_learns_from_as_many_tokens(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals, real = [], training.train

    def counted(*args: Any, **settings: Any) -> training.Trained:
        trained = real(*args, **settings)
        totals[-1] += trained.num_tokens
        return trained

    monkeypatch.setattr(training, "train", counted)
    monkeypatch.setattr(sheared, "train", counted)
    texts = random_texts(12, 40, ("chat", "code"), 120)
    for number, name in enumerate(("sheared", "width, trained as sheared")):
        totals.append(0)
        (tmp_path / str(number)).mkdir()
        shrink.measure(Bench(tiny_target, texts, texts, 0.05, tmp_path / str(number)), ROWS[name], seed=0)
    assert totals[0] == totals[1] > 12 * 40
