"""The kept table of what steps take: whole, and of this machine, or not read at all."""

from collections.abc import Callable
from pathlib import Path

import pytest

from models.core.throughput import costfile
from models.core.throughput.cost import Cost, Time

TABLE = Cost.measured(
    [Time(1, 1, 0, 10.0), Time(1, 4, 0, 13.0), Time(4, 4, 0, 16.0), Time(4, 16, 0, 40.0), Time(4, 4, 1, 20.0)],
    "this machine",
)


def test_a_table_is_read_as_it_was_saved(tmp_path: Path) -> None:
    file, cost = tmp_path / "cost.json", TABLE
    for _ in range(50):
        cost = cost.after(Time(4, 8, 1, 35.0))
    costfile.save(cost, file)
    read = costfile.load(file, "this machine")
    for step in ((1, 3, 2), (2, 5, 0), (4, 8, 1), (9, 18, 1)):
        assert read.step_ms(*step) == pytest.approx(cost.step_ms(*step))
    assert not read.grows


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda text: text[: len(text) // 2], "no table"),
        (lambda text: "", "no table"),
        (lambda text: text.replace("this machine", "another one"), "measured for another one, wanted this machine"),
        (lambda text: text.replace('"format": 2', '"format": 1'), "no table"),
        (lambda text: text.replace("10.0", "-10.0"), "no table"),
        (lambda text: text.replace("10.0", "NaN"), "no table"),
        (lambda text: text.replace("[10.0, 13.0]", "[10.0]"), "no table"),
    ],
)
def test_a_torn_or_foreign_table_is_refused(tmp_path: Path, change: Callable[[str], str], fault: str) -> None:
    file = tmp_path / "cost.json"
    costfile.save(TABLE, file)
    text = change(file.read_text())
    assert text != file.read_text()
    file.write_text(text)
    with pytest.raises(ValueError, match=fault):
        costfile.load(file, "this machine")


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cost.json is no table"):
        costfile.load(tmp_path / "cost.json", "this machine")
