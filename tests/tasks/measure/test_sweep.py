"""A sweep finds the rate that is best, on documents that are neither learnt nor reported, once for all seeds."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.measure import lesson, sweep
from tasks.measure.cells import Cells
from tasks.measure.comparisons import Bench, Row, adapters, losses, quantize, regimes, shrink
from tests.tasks.measure.benches import random_texts

DOCUMENTS = {"chat": [[number, 1, 2] for number in range(17)], "code": [[100, 1], [101, 1]]}


def valley(best: float):
    """Return a loss that is least at a rate, and grows with the distance in powers of the factor."""
    return lambda rate: abs(math.log(rate / best, sweep.FACTOR))


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (1e-3, [1e-3, 3.33e-4, 3e-3]),
        (3.1e-3, [1e-3, 3.33e-4, 3e-3, 9e-3]),
        (1.1e-4, [1e-3, 3.33e-4, 3e-3, 1.11e-4, 3.7e-5]),
        (1.0, [1e-3, 3.33e-4, 3e-3, 9e-3, 0.027]),
    ],
)
def test_the_best_of_three_rates_is_taken_and_what_lies_beyond_is_tried_where_that_is_the_outermost(
    best: float, tried: list[float]
) -> None:
    found = sweep.find_rate(1e-3, valley(best))
    assert list(found) == pytest.approx(tried)
    assert min(found, key=found.get) == min(found, key=lambda rate: abs(math.log(rate / best)))


def test_a_rate_at_which_training_diverges_is_not_taken_and_one_row_may_not_diverge_at_all_of_them() -> None:
    def loss_at(rate: float) -> float:
        if rate > 0.5:
            raise FloatingPointError("the loss is inf at step 3")
        return math.nan if rate > 0.2 else 1.0

    losses = sweep.find_rate(0.3, loss_at)
    assert (losses[0.3], losses[0.1]) == (math.inf, 1.0)
    with pytest.raises(ValueError, match="diverges at every learning rate of the sweep: 0.1, 0.3, 0.9"):
        sweep.find_rate(0.3, lambda rate: math.inf)


def test_what_a_sweep_is_judged_on_is_neither_learnt_nor_reported() -> None:
    bench = Bench(Path(), DOCUMENTS, {"chat": [[7, 7]], "code": [[8, 8]]}, 1.0, Path())
    aside = sweep.set_aside(bench)
    assert aside.held_out == {"chat": DOCUMENTS["chat"][-2:], "code": DOCUMENTS["code"][-1:]}
    assert {domain: some + aside.held_out[domain] for domain, some in aside.train.items()} == DOCUMENTS
    with pytest.raises(ValueError, match='domain "code" has 1 training documents; a sweep takes 2'):
        sweep.set_aside(bench._replace(train={"code": [[1, 2]]}))


def test_a_row_is_swept_once_kept_on_disk_and_told_the_rate_of_the_row_it_is_measured_against(tmp_path: Path) -> None:
    trained = []

    def tune(bench: Bench, row: Row, seed: int) -> float:
        assert seed == sweep.SEED and bench.held_out["code"] == [[101, 1]] and not list(bench.work_dir.iterdir())
        trained.append(row.name)
        return valley({"plain": 1e-3, "coarse": 3e-3}[row.name])(row.settings["learning_rate"])

    rows = [
        Row("untrained", {"learning_rate": None}),
        Row("plain", {"learning_rate": 1e-3}),
        Row("coarse", {"learning_rate": 1e-3, "against": "plain"}),
    ]
    comparison = SimpleNamespace(rows=lambda budget: rows, tune=tune)
    bench, cells = Bench(Path(), DOCUMENTS, {}, 1.0, Path()), Cells(tmp_path, {})
    assert sweep.tuned(comparison, bench, rows[0], cells) == rows[0] and sweep.seconds(rows[0], cells) == 0
    coarse = sweep.tuned(comparison, bench, rows[2], cells)
    assert (coarse.settings["learning_rate"], coarse.settings["against_rate"]) == (3e-3, 1e-3)
    assert trained == ["coarse"] * 4 + ["plain"] * 3 and sweep.seconds(rows[2], cells) > 0
    assert sweep.tuned(comparison, bench, rows[1], cells).settings["learning_rate"] == 1e-3 and len(trained) == 7
    assert sweep.tuned(comparison, bench, rows[2], Cells(tmp_path, {})) == coarse and len(trained) == 7
    assert cells.read("coarse-sweep")["losses"][0] == pytest.approx([1e-3, 1.0])


def test_a_row_that_diverges_is_named() -> None:
    comparison = SimpleNamespace(tune=lambda bench, row, seed: math.nan)
    with pytest.raises(ValueError, match="row coarse: training diverges"):
        sweep.sweep_row(comparison, Bench(Path(), DOCUMENTS, {}, 1.0, Path()), Row("coarse", {"learning_rate": 1.0}))


@pytest.mark.slow
def test_a_draft_is_judged_by_what_is_accepted_of_it_on_documents_that_are_set_aside(
    tiny_target: Path, tmp_path: Path
) -> None:
    texts = {"chat": 3 * random_texts(8, 24)["chat"]}  # a random target's say nothing of others
    aside = sweep.set_aside(Bench(tiny_target, texts, {}, 0.1, tmp_path))
    row = next(row for row in losses.rows(0.1) if row.name == losses.BASELINE)
    longer = row._replace(settings={**row.settings, "num_epochs": 60})
    good, none = (
        losses.tune(aside._replace(work_dir=tmp_path / str(rate)), sweep.at_rate(longer, rate), sweep.SEED)
        for rate in (lesson.LEARNING_RATE, 1e-9)
    )
    assert -4 <= good < none <= -1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("comparison", "name"),
    [
        (adapters, "lora"),
        (regimes, "half_as_long"),
        (quantize, "qat"),
        (shrink, "sheared"),
        (shrink, "low_rank 0.8, then lora"),
    ],
)
def test_a_row_is_judged_by_what_it_learns_at_a_rate(comparison, name: str, tiny_target: Path, tmp_path: Path) -> None:
    texts = random_texts(12, 40, ("chat", "code"), end=120)
    aside = sweep.set_aside(Bench(tiny_target, texts, texts, 0.05, tmp_path))
    row = next(row for row in comparison.rows(0.05) if row.name == name)
    found = []
    for rate in (row.settings["learning_rate"], 1e-9):
        (work := tmp_path / str(rate)).mkdir()
        found.append(comparison.tune(aside._replace(work_dir=work), sweep.at_rate(row, rate), sweep.SEED))
    assert all(0 < loss < 10 for loss in found) and found[0] != found[1]
