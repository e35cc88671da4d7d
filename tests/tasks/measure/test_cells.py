"""Finished cells stay; cells of another setup are not mixed in."""

import pytest

from tasks.measure.cells import Cells


def test_a_finished_cell_is_measured_once_also_by_the_next_run(tmp_path):
    measured = []

    def measure() -> dict[str, list[int]]:
        measured.append(1)
        return {"ms": [1, 2]}

    assert Cells(tmp_path, {"commit": "a"}).keep("first", measure) == {"ms": [1, 2]}
    again = Cells(tmp_path, {"commit": "a"})
    assert again.keep("first", measure) == {"ms": [1, 2]}
    assert len(measured) == 1
    assert (again.has("first"), again.has("second")) == (True, False)


def test_a_cell_that_fails_leaves_nothing(tmp_path):
    cells = Cells(tmp_path, {})

    def fail() -> None:
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError):
        cells.keep("first", fail)
    assert not cells.has("first")
    assert [file.name for file in tmp_path.iterdir()] == ["setup.json"]


def test_cells_of_another_setup_are_refused_and_the_difference_is_named(tmp_path):
    Cells(tmp_path, {"commit": "a", "options": {"rounds": 2}})
    with pytest.raises(
        ValueError, match=r"measured with another commit, options; remove the folder, or choose another"
    ):
        Cells(tmp_path, {"commit": "b", "options": {"rounds": 3}})


def test_a_figure_that_is_not_a_number_is_not_kept(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        Cells(tmp_path, {}).keep("first", lambda: float("nan"))
