"""Charts are well-formed, say in words what they show, and let no name become markup."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from infra.views import charts
from infra.views.charts import MAX_SERIES, WIDTH, Axis, bar_chart, interval_chart, line_chart
from models.types import Estimate

SVG = "{http://www.w3.org/2000/svg}"
NAME = '<b>"chat" & co</b>'


def parsed(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(str(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def texts(chart: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in chart.iter(f"{SVG}text")]


def drawn_line(points: list[tuple[float, float]], marks: tuple[tuple[float, str], ...] = ()) -> ElementTree.Element:
    return parsed(line_chart("key", "τ", "falls", {NAME: [points]}, marks, ("request", "τ"), 1.0))


ONE = Estimate(value=1, low=-2, high=3)
CHARTS = {
    "line": lambda names: line_chart(
        "key", "τ", "falls", {name: [[(1, 1.5), (2, 2), (3, 1.2)]] for name in names}, [], ("request", "τ"), 1.0
    ),
    "interval": lambda names: interval_chart("key", "τ", "falls", dict.fromkeys(names, ONE), [(0, ""), (-5, "c")], "%"),
    "bar": lambda names: bar_chart(
        "key", "τ", "falls", {name: {"without a draft": 120.0, "as drafted": 90.0} for name in names}, "tokens/s"
    ),
}


@pytest.mark.parametrize("make", CHARTS.values(), ids=CHARTS)
def test_a_chart_is_named_and_described_and_keeps_names_as_text(make) -> None:
    chart = parsed(make([NAME]))
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


@pytest.mark.parametrize("make", CHARTS.values(), ids=CHARTS)
def test_names_are_whole_and_inside_however_long_they_are(make) -> None:
    names = [f"a-domain-with-a-long-name-{number}" for number in range(MAX_SERIES)]
    chart = parsed(make(names))
    assert set(names) <= set(texts(chart))
    for text in chart.iter(f"{SVG}text"):
        x, length = float(text.get("x")), 7.0 * len(text.text or "")
        left = {"start": x, "middle": x - length / 2, "end": x - length}[text.get("text-anchor")]
        assert left >= -0.5 and left + length <= WIDTH + 0.5, text.text


def test_a_line_goes_up_where_its_values_do_and_a_swap_is_marked_with_its_name() -> None:
    chart = drawn_line([(1, 1.5), (2, 2.0), (3, 1.2)], ((2, "draft 2"),))
    line = chart.find(f"{SVG}polyline").get("points")
    (x1, y1), (x2, y2), (x3, y3) = [tuple(map(float, point.split(","))) for point in line.split()]
    assert x1 < x2 < x3
    assert y2 < y1 < y3
    [mark] = [one for one in chart.iter(f"{SVG}line") if one.get("class") == "mark"]
    assert float(mark.get("x1")) == x2
    assert "draft 2" in texts(chart)


def test_a_long_curve_keeps_its_end_and_not_all_points() -> None:
    line = drawn_line([(n, 1.5) for n in range(5000)]).find(f"{SVG}polyline").get("points").split()
    assert len(line) <= charts.MAX_POINTS + 1
    assert line[-1].startswith(f"{WIDTH - charts.RIGHT:.1f},")


def test_a_single_point_is_a_dot() -> None:
    assert drawn_line([(1, 1.5)]).find(f"{SVG}polyline") is None
    assert drawn_line([(1, 1.5)]).find(f"{SVG}circle") is not None


def test_bars_are_as_long_as_their_values() -> None:
    bars = [box for box in parsed(CHARTS["bar"](["chat"])).iter(f"{SVG}rect") if box.get("height") == "14"]
    on, off = (float(bar.get("width")) for bar in bars)
    assert on / off == pytest.approx(120 / 90, rel=0.01)


@pytest.mark.parametrize(
    ("make", "names", "fault"),
    [
        ("line", [], "got 0 points of 0"),
        ("line", list("abcdefg"), "wanted points of 1 to 6 names, got 21 points of 7"),
        ("interval", [], "at least one row"),
        ("bar", [], "a value above 0, the largest is 0"),
    ],
)
def test_what_can_not_be_drawn_is_refused(make: str, names: list[str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        CHARTS[make](names)


@pytest.mark.parametrize("names", [[NAME, "code"], [f"domain {number}" for number in range(MAX_SERIES + 1)]])
def test_curves_are_drawn_into_a_file_that_needs_no_page_however_many_there_are(tmp_path, names) -> None:
    file = charts.draw_tau({name: [(1, 1.5), (2, 1.7)] for name in names}, tmp_path / "tau.svg")
    drawn = ElementTree.parse(file).getroot()
    assert set(names) <= set(texts(drawn))
    assert len(drawn.findall(f"{SVG}svg")) == 1 + (len(names) > MAX_SERIES)
    assert "var(--c0)" in drawn.findtext(f"{SVG}style", "")


def test_losses_and_a_single_look_at_what_was_validated_are_drawn(tmp_path: Path) -> None:
    losses = charts.draw_losses([(step, 1 / step) for step in range(1, 50)], tmp_path / "losses.svg")
    looked = charts.draw_validation([(40, 1.4)], tmp_path / "validation.svg")
    assert len([*ElementTree.parse(losses).getroot().iter(f"{SVG}polyline")]) == 1
    assert len([*ElementTree.parse(looked).getroot().iter(f"{SVG}circle")]) == 1
