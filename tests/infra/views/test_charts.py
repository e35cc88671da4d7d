"""Charts are well-formed, say in words what they show, and let no name become markup."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from infra.views.charts import (
    MAX_POINTS,
    MAX_SERIES,
    RIGHT,
    WIDTH,
    Axis,
    bar_chart,
    draw_losses,
    draw_tau,
    draw_validation,
    interval_chart,
    line_chart,
)
from models.types import Estimate

SVG = "{http://www.w3.org/2000/svg}"
NAME = '<b>"chat" & co</b>'


def parsed(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(str(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def texts(chart: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in chart.iter(f"{SVG}text")]


def drawn_line(points: list[tuple[float, float]], marks: list[tuple[float, str]] | None = None) -> ElementTree.Element:
    return parsed(line_chart("key", "τ", "falls", {NAME: [points]}, marks or [], ("request", "τ"), 1.0))


CHARTS = {
    "line": lambda: drawn_line([(1, 1.5), (2, 2.0), (3, 1.2)], [(2, "draft 2")]),
    "interval": lambda: parsed(
        interval_chart("key", "τ", "falls", {NAME: Estimate(value=1, low=-2, high=3)}, [(0, ""), (-5, "floor")], "%")
    ),
    "bar": lambda: parsed(bar_chart("key", "τ", "falls", {NAME: {"on": 120.0, "off": 90.0}}, "tokens/s")),
}


@pytest.mark.parametrize("make", CHARTS.values(), ids=CHARTS)
def test_a_chart_is_named_and_described_and_keeps_names_as_text(make) -> None:
    chart = make()
    assert chart.get("role") == "img"
    assert chart.get("aria-labelledby") == "key-title key-text"
    assert [chart.find(f"{SVG}{tag}").text for tag in ("title", "desc")] == ["τ", "falls"]
    assert any(text.startswith('<b>"chat"') for text in texts(chart))
    assert chart.find(f".//{SVG}b") is None


def test_ticks_are_round_and_inside() -> None:
    assert Axis(1.0, 2.05, 0, 100).ticks() == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8, 2.0])
    assert Axis(-7, 35, 0, 100).ticks() == [0, 10, 20, 30]
    assert Axis(0, 10, 20, 120).at(5) == 70


@pytest.mark.parametrize(
    ("seconds", "ticks"),
    [
        (6, ["14:03:20", "14:03:22", "14:03:24", "14:03:26"]),
        (1200, ["14:05", "14:10", "14:15", "14:20"]),
        (3600 * 20, ["18:00", "00:00", "06:00"]),
        (3600 * 44, ["Thu 00:00", "Thu 12:00", "Fri 00:00"]),
        (86400 * 16, ["19 Nov", "23 Nov", "27 Nov"]),
    ],
)
def test_times_are_round_and_as_exact_as_the_axis_is_long(seconds: int, ticks: list[str]) -> None:
    since_ms = 1_700_057_000_000  # Wednesday, 15 November 2023, 14:03:20 UTC
    axis = Axis(since_ms, since_ms + 1000 * seconds, 0, 100)
    found = axis.times()
    assert [label for _, label in found][: len(ticks)] == ticks
    assert 2 <= len(found) <= 6 and all(axis.low <= at <= axis.high for at, _ in found)


LONG = [f"a-domain-with-a-long-name-{number}" for number in range(MAX_SERIES)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: line_chart("key", "τ", "", {name: [[(1, 1.5), (2, 2)]] for name in LONG}, [], ("request", "τ"), 1.0),
        lambda: bar_chart("key", "τ", "", {name: {"without a draft": 1.0, "as drafted": 2.0} for name in LONG}, "x"),
        lambda: interval_chart("key", "τ", "", {name: Estimate(value=1, low=-2, high=3) for name in LONG}, [], "%"),
    ],
    ids=["line", "bar", "interval"],
)
def test_names_are_whole_and_inside_however_long_they_are(make) -> None:
    chart = parsed(make())
    assert set(LONG) <= set(texts(chart))
    for text in chart.iter(f"{SVG}text"):
        x, length = float(text.get("x")), 7.0 * len(text.text or "")
        left = {"start": x, "middle": x - length / 2, "end": x - length}[text.get("text-anchor")]
        assert left >= -0.5 and left + length <= WIDTH + 0.5, text.text


def test_a_line_goes_up_where_its_values_do_and_a_swap_is_marked_with_its_name() -> None:
    chart = drawn_line([(1, 1.5), (2, 2.0), (3, 1.2)], [(2, "draft 2")])
    line = chart.find(f"{SVG}polyline").get("points")
    (x1, y1), (x2, y2), (x3, y3) = [tuple(map(float, point.split(","))) for point in line.split()]
    assert x1 < x2 < x3
    assert y2 < y1 < y3
    [mark] = [one for one in chart.iter(f"{SVG}line") if one.get("class") == "mark"]
    assert float(mark.get("x1")) == x2
    assert "draft 2" in texts(chart)


def test_a_long_curve_keeps_its_end_and_not_all_points() -> None:
    line = drawn_line([(n, 1.5) for n in range(5000)]).find(f"{SVG}polyline").get("points").split()
    assert len(line) <= MAX_POINTS + 1
    assert line[-1].startswith(f"{WIDTH - RIGHT:.1f},")


def test_a_single_point_is_a_dot() -> None:
    assert drawn_line([(1, 1.5)]).find(f"{SVG}polyline") is None
    assert drawn_line([(1, 1.5)]).find(f"{SVG}circle") is not None


def test_bars_are_as_long_as_their_values() -> None:
    bars = [box for box in CHARTS["bar"]().iter(f"{SVG}rect") if box.get("height") == "14"]
    on, off = (float(bar.get("width")) for bar in bars)
    assert on / off == pytest.approx(120 / 90, rel=0.01)


def test_what_can_not_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0 points of 1"):
        drawn_line([])
    with pytest.raises(ValueError, match="wanted points of 1 to 6 names, got 7 points of 7"):
        line_chart("key", "τ", "", {str(n): [[(1, 1)]] for n in range(7)}, [], ("", ""), 1.0)
    with pytest.raises(ValueError, match="at least one row"):
        interval_chart("key", "τ", "", {}, [], "%")
    with pytest.raises(ValueError, match="a value above 0, the largest is 0"):
        bar_chart("key", "τ", "", {"chat": {"on": 0.0}}, "")


@pytest.mark.parametrize("names", [["chat"], [NAME, "code"], [f"domain {number}" for number in range(MAX_SERIES + 1)]])
def test_curves_are_drawn_into_a_file_that_needs_no_page_however_many_there_are(
    tmp_path: Path, names: list[str]
) -> None:
    file = draw_tau({name: [(1, 1.5), (2, 1.7)] for name in names}, tmp_path / "tau.svg")
    drawn = ElementTree.parse(file).getroot()
    assert set(names) <= set(texts(drawn))
    assert len(drawn.findall(f"{SVG}svg")) == 1 + (len(names) > MAX_SERIES)
    assert "var(--c0)" in drawn.findtext(f"{SVG}style", "")


def test_losses_and_a_single_look_at_what_was_validated_are_drawn(tmp_path: Path) -> None:
    losses = draw_losses([(step, 1 / step) for step in range(1, 50)], tmp_path / "losses.svg")
    looked = draw_validation([(40, 1.4)], tmp_path / "validation.svg")
    assert len([*ElementTree.parse(losses).getroot().iter(f"{SVG}polyline")]) == 1
    assert len([*ElementTree.parse(looked).getroot().iter(f"{SVG}circle")]) == 1
