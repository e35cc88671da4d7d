"""Finished cells stay; cells of another setup are not mixed in."""

import pytest

from tasks.measure.cells import Cells


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
