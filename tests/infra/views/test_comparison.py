"""The report of a comparison, by hand."""

from pathlib import Path

from infra.views.comparison import Comparison, MethodFigure, comparison_report, draw_tradeoffs, number, row_styles
from models.types import Estimate


def figure(value: float | None, reach: float | None = None, gain: tuple[float, float] | None = None) -> MethodFigure:
    def interval(middle: float, reach: float) -> Estimate:
        return Estimate(value=middle, low=middle - reach, high=middle + reach)

    measured = None if value is None or reach is None else interval(value, reach)
    return MethodFigure(value=value, interval=measured, gain=gain and interval(*gain))


def comparison(
    dense: dict[str, MethodFigure] | None = None, half: dict[str, MethodFigure] | None = None, num_seeds: int = 3
) -> Comparison:
    return Comparison(
        question="what does it cost?",
        baseline="dense",
        headings={"loss": "loss, nats", "counted": "counted"},
        figures={
            "dense": {"loss": figure(1.0, 0.1), "counted": figure(12345.0, 2.0)} | (dense or {}),
            "half": {"loss": figure(1.5, 0.1, (0.5, 0.2)), "counted": figure(None)} | (half or {}),
        },
        seconds={"dense": 3.2, "half": 8.0},
        num_seeds=num_seeds,
    )


def test_values_stand_with_their_intervals_and_differences_with_a_star(tmp_path: Path) -> None:
    report = comparison_report(comparison(), tmp_path / "compare.png")
    values, gains = report.grids
    assert values.rows == [["dense", "1 ± 0.1", "12,345 ± 2", "3"], ["half", "1.5 ± 0.1", "–", "8"]]
    assert gains.rows == [["half", "0.5 (0.3 to 0.7)*", "–"]]
    assert report.picture is not None
    assert report.picture.read_bytes().startswith(b"\x89PNG")


def test_few_seeds_are_said(tmp_path: Path) -> None:
    report = comparison_report(comparison(num_seeds=1), tmp_path / "compare.png")
    assert [grid.title.partition(",")[0] for grid in report.grids] == ["mean over 1 seed", "difference from dense"]
    assert report.notes[-1].startswith("Only 1 of at least 3 seeds: ")
    alone = {"loss": figure(1.0)}  # of a seed without documents
    assert len(comparison_report(comparison(alone, alone, num_seeds=1), tmp_path / "compare.png").grids) == 1


def test_a_difference_whose_interval_holds_nothing_does_not_differ() -> None:
    assert not figure(1.0, gain=(0.1, 0.2)).differs
    assert (number(None), number(0.123456), number(123456.7)) == ("–", "0.1235", "123,457")


def test_what_is_counted_has_no_interval(tmp_path: Path) -> None:
    counted = comparison({"counted": figure(12.0, 0.0)}, {"counted": figure(6.3, 0.0, (-5.7, 1e-12))})
    values, gains = comparison_report(counted, tmp_path / "compare.png").grids
    assert [row[2] for row in values.rows] == ["12", "6.3"]
    assert gains.rows[0][2] == "-5.7"


def test_rows_are_told_apart_by_colour_and_mark() -> None:
    styles = list(row_styles([str(number) for number in range(100)]).values())
    assert len(set(styles)) == 100
    for start in range(90):
        colours, marks = zip(*styles[start : start + 10], strict=True)
        assert len(set(colours)) == 10 and (len(set(marks)) >= 9)


def test_a_row_without_a_figure_is_left_out_of_the_view_over_families_and_of_its_legend(tmp_path: Path) -> None:
    def drawn(name: str, second: float | None) -> bytes:
        rows = {
            "float": {"kl": figure(0.0), "mib": figure(256.0)},
            "coarse": {"kl": figure(1.2, 0.3), "mib": figure(100.0)},
            "fine": {"kl": figure(second), "mib": figure(150.0)},
        }
        return draw_tradeoffs(rows, {"kl": "KL", "mib": "MiB"}, "kl", ["mib"], tmp_path / name).read_bytes()

    without, with_it = drawn("without.png", None), drawn("with.png", 0.01)
    assert without.startswith(b"\x89PNG") and without != with_it
