"""Figures over seeds, worked by hand; and what a comparison must not do."""

import json
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from models.core.evaluation.spread import Mean
from tasks.measure.compare_methods import (
    ROOMS,
    choose_rows,
    code_modules,
    measure_cell,
    metrics_of,
    summarise,
    t_interval,
)
from tasks.measure.comparisons import Bench, Row, load_comparison
from tasks.stages import code_hashes

BENCH = Bench(Path(), {}, {}, 1.0, Path())


def comparison(measured: dict[str, float], *names: str) -> SimpleNamespace:
    """Return something of a comparison's shape."""
    return SimpleNamespace(
        BASELINE="dense",
        COLUMNS={"loss": "loss, lower is better"},
        rows=lambda budget: [Row(name, {}) for name in names],
        measure=lambda bench, row, seed: measured,
    )


def test_an_interval_of_three_values_is_students() -> None:
    # Mean 2, deviation 1; t of 97.5% with two degrees of freedom is 4.3027, over √3 that is 2.4842.
    found = t_interval([1.0, 2.0, 3.0])
    assert (found.value, found.low, found.high) == pytest.approx((2, 2 - 2.4842, 2 + 2.4842), abs=1e-4)
    assert t_interval([1.0]) is None


def test_differences_are_paired_by_seed_so_what_all_rows_share_cancels() -> None:
    cells = {"dense": [{"loss": 1.0}, {"loss": 9.0}], "half": [{"loss": 1.5}, {"loss": 9.5}]}
    found = summarise(cells, "dense")
    dense, half = (found[row]["loss"] for row in ("dense", "half"))
    assert (half.gain.value, half.gain.low, half.gain.high, half.differs) == (0.5, 0.5, 0.5, True)
    assert half.interval.low < 0
    assert (dense.gain, dense.differs) == (None, False)


def test_a_metric_without_sense_for_a_row_has_no_figure_and_no_difference_and_one_seed_no_interval() -> None:
    found = summarise({"dense": [{"loss": None}] * 2, "half": [{"loss": 1.0}, {"loss": 2.0}]}, "dense")
    assert found["dense"]["loss"].value is None
    assert (found["half"]["loss"].value, found["half"]["loss"].gain) == (1.5, None)
    one = summarise({"dense": [{"loss": 1.0}], "half": [{"loss": 2.0}]}, "dense")["half"]["loss"]
    assert (one.value, one.interval, one.gain) == (2.0, None, None)


def test_documents_are_kept_in_a_cell_so_that_one_seed_has_an_interval() -> None:
    one = comparison({"loss": Mean([1.0, 4.0], [3.0, 1.0])}, "dense")
    cell = json.loads(json.dumps(measure_cell(one, BENCH, Row("dense", {}), 0)))
    assert cell["metrics"] == {"loss": 1.75}
    found = metrics_of(cell)["loss"]
    assert isinstance(found, Mean) and found == pytest.approx(1.75)
    nothing = measure_cell(comparison({"loss": Mean([1.0, math.nan])}, "dense"), BENCH, Row("dense", {}), 0)
    assert metrics_of(nothing) == {"loss": None}
    more = Mean([value + 1 for value in found.documents])
    gain = summarise({"dense": [{"loss": found}], "half": [{"loss": more}]}, "dense")["half"]["loss"].gain
    assert (gain.value, gain.low, gain.high) == pytest.approx((1, 1, 1))


def test_a_cell_has_a_folder_of_its_own_that_is_gone_afterwards() -> None:
    seen, one = set(), comparison({}, "dense")

    def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
        (bench.work_dir / "file").touch()
        seen.add(bench.work_dir)
        return {"loss": float("nan")}

    one.measure = measure
    cells = [measure_cell(one, BENCH, Row("dense", {}), seed) for seed in (0, 1)]
    assert cells[0]["metrics"] == {"loss": None}
    assert len(seen) == 2 and not any(folder.exists() for folder in seen)


def test_metrics_that_are_not_the_columns_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="row dense: measured and COLUMNS differ in los, loss"):
        measure_cell(comparison({"los": 1.0}), BENCH, Row("dense", {}), 0)


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (("half",), 'no row is the baseline "dense"; there are: half'),
        (("dense", "dense"), "rows must have different names"),
        (("dense", "1/2"), "that are good for files"),
    ],
)
def test_rows_that_can_not_be_told_apart_or_have_no_baseline_are_refused(names: tuple[str, ...], fault: str) -> None:
    one: ModuleType = comparison({}, *names)
    with pytest.raises(ValueError, match=fault):
        choose_rows(one, 1.0)


def test_rows_are_chosen_by_pattern_beside_the_baseline() -> None:
    one: ModuleType = comparison({}, "dense", "gptq", "gptq, symmetric", "awq")
    assert [row.name for row in choose_rows(one, 1.0, ["gptq*"])] == ["dense", "gptq", "gptq, symmetric"]
    with pytest.raises(ValueError, match=r'--only: no row "gpqt" \(did you mean "gptq"\?\)'):
        choose_rows(one, 1.0, ["gpqt"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("arithmetic", "models.core.layers.numbers"),
        ("all", "tasks.change_model"),
        ("all", "models.shrink.width"),
        ("prune", "tasks.measure.likeness"),
        ("quantize", "models.prune.sparsegpt"),
        ("sensitivity", "models.quantize.int8_static"),  # its constants name methods too
        ("losses", "models.drafts.eagle3"),
    ],
)
def test_cells_hang_on_the_code_that_computes_them(family: str, module: str) -> None:
    comparison = load_comparison(family)
    rows = comparison.rows(1.0)
    hashes = code_hashes(*code_modules(comparison, rows[:1] if family == "sensitivity" else rows), rooms=ROOMS)
    assert module in hashes
