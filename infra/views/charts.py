"""Charts as SVG, inline in a page that loads nothing, or as files: colours and fonts come from charts.css.

They are as wide as a phone, and names stand above what they name, so that no text is cut off or too small to read.
Colour is never the only sign: series differ in their dashes too. Each chart carries a title and a description for who
can't see it; the page has the same figures as a table beside it.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from models.types import Estimate

WIDTH = 400
LEFT, RIGHT, TOP, BOTTOM = 40, 16, 28, 46
EDGE = 12  # where a chart begins whose names stand above their rows
MIDDLE = (EDGE + WIDTH - RIGHT) / 2
ROW_HEIGHT, BAR_HEIGHT, PLOT_HEIGHT = 42, 14, 248
LEGEND_GAP, LEGEND_HEIGHT, MIN_LABEL_GAP, LETTER_WIDTH = 16, 18, 64, 7.0
DAY_S = 86400
# Between two ticks of a time axis, in seconds; beyond them it is whole days.
TIME_STEPS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, DAY_S)
MAX_SERIES = 6  # as many colours as the style sheet has
MAX_POINTS = 400
TAU = "τ, mean accepted length"

Point = tuple[float, float]


class Axis(NamedTuple):
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        rough = (self.high - self.low) / 6
        size = 10 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * number for number in range(first, last + 1)]

    def times(self) -> list[tuple[float, str]]:
        """Return ticks of an axis of ms since 1970, at round times of UTC, and how each is shown."""
        span_s = (self.high - self.low) / 1000
        step_s = next((step for step in TIME_STEPS_S if 5 * step >= span_s), DAY_S * math.ceil(span_s / 5 / DAY_S))
        form = "%H:%M:%S" if step_s < 60 else "%H:%M" if span_s < DAY_S else "%a %H:%M" if step_s < DAY_S else "%d %b"
        first, last = math.ceil(self.low / 1000 / step_s), math.floor(self.high / 1000 / step_s)
        seconds = [step_s * number for number in range(first, last + 1)]
        return [(1000.0 * at, datetime.fromtimestamp(at, UTC).strftime(form)) for at in seconds]


def line_chart(
    key: str,
    title: str,
    description: str,
    curves: Mapping[str, Sequence[Sequence[Point]]],
    marks: Sequence[tuple[float, str]],
    labels: tuple[str, str],
    base: float,
    over_time: bool = False,
) -> Markup:
    """Draw curves over numbers, at most MAX_SERIES of them by name, each in parts, and `marks` upright by x.

    No y is below `base`, where the upright axis starts; with `over_time` each x is a time in ms since 1970. ValueError
    without a point, or with too many names.
    """
    points = [point for parts in curves.values() for part in parts for point in part]
    if not points or len(curves) > MAX_SERIES:
        raise ValueError(f"wanted points of 1 to {MAX_SERIES} names, got {len(points)} points of {len(curves)}")
    xs, top = [x for x, _ in points], max(y for _, y in points)
    legend, below = _legend(list(curves), "line")
    height = below + PLOT_HEIGHT
    x_axis = Axis(min(xs), max(*xs, min(xs) + (1000 if over_time else 1)), LEFT, WIDTH - RIGHT)
    y_axis = Axis(base, max(base + 0.1, base + 1.08 * (top - base)), height - BOTTOM, below + 36)
    grid = _level_grid(x_axis, y_axis.start, y_axis.start, x_axis.times() if over_time else None)
    drawn = [legend, _upright_grid(y_axis), grid]
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 6, labels[0], "middle", "axis"))
    drawn.append(_text(4, below + 12, labels[1], "start", "axis"))
    labelled = -math.inf
    for x, label in marks:
        at = x_axis.at(x)
        drawn.append(_line(at, y_axis.end, at, y_axis.start, "mark"))
        if at - labelled >= MIN_LABEL_GAP:
            drawn.append(_beside(at, y_axis.end - 6, label))
            labelled = at
    for index, parts in enumerate(curves.values()):
        drawn += [_path(part, x_axis, y_axis, index) for part in parts]
    return _figure(key, title, description, height, drawn)


def interval_chart(
    key: str, title: str, description: str, rows: Mapping[str, Estimate], lines: Sequence[tuple[float, str]], label: str
) -> Markup:
    """Draw one interval a row, against vertical lines, plain ones without a label; ValueError without a row."""
    if not rows:
        raise ValueError("wanted at least one row, got none")
    values = [*(end for one in rows.values() for end in (one.low, one.high)), *(value for value, _ in lines)]
    room = 0.06 * max(max(values) - min(values), 1e-6)
    x_axis = Axis(min(values) - room, max(values) + room, EDGE, WIDTH - RIGHT)
    bottom = TOP + ROW_HEIGHT * len(rows)
    drawn = [_level_grid(x_axis, TOP, bottom), _text(MIDDLE, bottom + BOTTOM - 6, label, "middle", "axis")]
    for value, name in lines:
        at = x_axis.at(value)
        drawn.append(_line(at, TOP, at, bottom, "limit" if name else "zero"))
        drawn.append(_beside(at, TOP - 8, name))
    for number, (name, one) in enumerate(rows.items()):
        y = TOP + ROW_HEIGHT * (number + 0.7)
        drawn.append(_text(EDGE, y - 10, name, "start", "name"))
        low, high = x_axis.at(one.low), x_axis.at(one.high)
        drawn += [_line(low, y, high, y, "s0 bar"), *(_line(end, y - 5, end, y + 5, "s0 bar") for end in (low, high))]
        drawn.append(Markup('<circle class="s0 dot" cx="{}" cy="{}" r="4.5"/>').format(x_axis.at(one.value), y))
    return _figure(key, title, description, bottom + BOTTOM, drawn)


def bar_chart(key: str, title: str, description: str, rows: Mapping[str, Mapping[str, float]], label: str) -> Markup:
    """Draw bars from 0, some for each name; all names have the same series; ValueError if there is no value above 0."""
    largest = max((value for bars in rows.values() for value in bars.values()), default=0.0)
    if largest <= 0:
        raise ValueError(f"wanted a value above 0, the largest is {largest}")
    series = list(next(iter(rows.values())))
    x_axis = Axis(0, 1.15 * largest, EDGE, WIDTH - RIGHT)
    row_height = len(series) * (BAR_HEIGHT + 3) + 28
    legend, top = _legend(series, "box")
    bottom = top + row_height * len(rows)
    drawn = [legend, _level_grid(x_axis, top, bottom)]
    drawn.append(_text(MIDDLE, bottom + BOTTOM - 6, label, "middle", "axis"))
    for number, (name, bars) in enumerate(rows.items()):
        first = top + row_height * number + 22
        drawn.append(_text(EDGE, first - 6, name, "start", "name"))
        for index, value in enumerate(bars.values()):
            y, end = first + index * (BAR_HEIGHT + 3), x_axis.at(value)
            box = Markup('<rect class="s{} fill" x="{}" y="{}" width="{:.1f}" height="{}" rx="2"/>')
            drawn.append(box.format(index, EDGE, y, end - EDGE, BAR_HEIGHT))
            drawn.append(_text(end + 6, y + BAR_HEIGHT - 3, f"{value:.1f}", "start", "name"))
    return _figure(key, title, description, bottom + BOTTOM, drawn)


def draw_losses(losses: Sequence[Point], file: Path) -> Path:
    """Draw (optimizer step, running mean of the loss) into an SVG file and return it."""
    return _draw_curves({"loss": losses}, ("optimizer step", "loss"), 0.0, file)


def draw_validation(taus: Sequence[Point], file: Path) -> Path:
    """Draw (optimizer step, τ on answers kept from training) into an SVG file and return it."""
    return _draw_curves({"validation": taus}, ("optimizer step", TAU), 1.0, file)


def draw_tau(taus: Mapping[str, Sequence[Point]], file: Path) -> Path:
    """Draw τ over the versions of a line of champions, oldest first, into an SVG file and return it."""
    return _draw_curves(taus, ("draft version", TAU), 1.0, file)


def write_charts(charts: Sequence[Markup], file: Path) -> Path:
    """Write charts below each other into an SVG file, with the style that a page has for them, and return it."""
    drawn, top = [], 0.0
    for chart in charts:
        height = float(chart.partition("viewBox=")[2].split('"')[1].split()[3])
        drawn.append(f'<svg y="{top:g}" width="{WIDTH}" height="{height:g}" {chart.removeprefix("<svg ")}')
        top += height
    style = Path(__file__).with_name("charts.css").read_text(encoding="utf-8")
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:g}">\n<style>\n{style}</style>'
    page = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    file.write_text("\n".join([opening, page, *drawn, "</svg>\n"]), encoding="utf-8")
    return file


def _draw_curves(curves: Mapping[str, Sequence[Point]], labels: tuple[str, str], base: float, file: Path) -> Path:
    title = f"{labels[1]} by {labels[0]}"
    charts = []
    for start in range(0, len(curves), MAX_SERIES):
        named = list(curves.items())[start : start + MAX_SERIES]
        last = "; ".join(f"{name}: {points[-1][1]:.3g} at {points[-1][0]:g}" for name, points in named)
        parts = {name: [points] for name, points in named}
        charts.append(line_chart(f"curves-{start}", title, last, parts, [], labels, base))
    return write_charts(charts, file)


def _figure(key: str, title: str, description: str, height: float, drawn: Sequence[Markup]) -> Markup:
    opening = Markup(
        '<svg viewBox="0 0 {} {:g}" role="img" aria-labelledby="{key}-title {key}-text">'
        '<title id="{key}-title">{}</title><desc id="{key}-text">{}</desc>'
    ).format(WIDTH, height, title, description, key=key)
    return opening + Markup("\n").join(drawn) + Markup("</svg>")


def _upright_grid(axis: Axis) -> Markup:
    ticks = [(axis.at(value), f"{value:g}") for value in axis.ticks()]
    drawn = (
        _line(LEFT, y, WIDTH - RIGHT, y, "grid") + _text(LEFT - 8, y + 4, tick, "end", "tick") for y, tick in ticks
    )
    return Markup("").join(drawn)


def _level_grid(axis: Axis, top: float, bottom: float, shown: Sequence[tuple[float, str]] | None = None) -> Markup:
    """Draw upright lines at ticks, by default at round numbers."""
    numbers = [(value, f"{round(value, 9):g}") for value in axis.ticks()] if shown is None else shown
    ticks = [(axis.at(value), tick) for value, tick in numbers]
    halves = [len(tick) * LETTER_WIDTH / 2 for _, tick in ticks]
    drawn = (
        _line(x, top, x, bottom + 4, "grid")
        + _text(min(max(x, half), WIDTH - half), bottom + 19, tick, "middle", "tick")  # whole at the chart's edges too
        for (x, tick), half in zip(ticks, halves, strict=True)
    )
    return Markup("").join(drawn)


def _legend(names: Sequence[str], shape: str) -> tuple[Markup, float]:
    """Draw names side by side, in as many lines as they take; returns also where the next thing may be drawn."""
    drawn, x, y = [], float(EDGE), 14.0
    for index, name in enumerate(names):
        width = 30 + len(name) * LETTER_WIDTH
        if x > EDGE and x + width > WIDTH - RIGHT:
            x, y = float(EDGE), y + LEGEND_HEIGHT
        if shape == "line":
            drawn.append(_line(x, y - 4, x + 24, y - 4, f"s{index} curve"))
        else:
            box = Markup('<rect class="s{} fill" x="{:g}" y="{:g}" width="22" height="12" rx="2"/>')
            drawn.append(box.format(index, x, y - 10))
        drawn.append(_text(x + 30, y, name, "start", "name"))
        x += width + LEGEND_GAP
    return Markup("").join(drawn), y + 10


def _path(points: Sequence[Point], x_axis: Axis, y_axis: Axis, index: int) -> Markup:
    if len(points) == 1:
        dot = Markup('<circle class="s{} dot" cx="{}" cy="{}" r="3"/>')
        return dot.format(index, x_axis.at(points[0][0]), y_axis.at(points[0][1]))
    step = math.ceil(len(points) / MAX_POINTS)
    kept = [*points[:-1:step], points[-1]]
    line = " ".join(f"{x_axis.at(x)},{y_axis.at(y)}" for x, y in kept)
    return Markup('<polyline class="s{} curve" points="{}"/>').format(index, line)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{:g}" y1="{:g}" x2="{:g}" y2="{:g}"/>').format(kind, x1, y1, x2, y2)


def _text(x: float, y: float, text: str, anchor: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{:g}" y="{:g}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, text)


def _beside(x: float, y: float, text: str) -> Markup:
    fits = x + len(text) * LETTER_WIDTH <= WIDTH - RIGHT
    return _text(x, y, text, "start" if fits else "end", "name")
