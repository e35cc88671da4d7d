"""The outcome of a comparison of methods: a row a method, a column a metric, intervals over seeds."""

from collections.abc import Mapping, Sequence
from math import isclose
from pathlib import Path
from textwrap import wrap
from typing import Any

from infra.views import NONE, shown
from infra.views.figures import SIZE_INCHES, new_figure, saved
from infra.views.results import Grid, Report
from models.types import Estimate, Frozen

FEWEST_SEEDS = 3
# Means that differ by more than so many times are drawn on a logarithmic axis.
WIDE = 20.0
HEADING_WIDTH = 40  # characters that fit below a panel
MARKS = "osD^v<>PXp*hHd8.1234+"


class MethodFigure(Frozen):
    """One metric of one row, the mean over seeds; None where the metric makes no sense for the row.

    `gain` is the row's difference from the baseline, paired by seed and document; None for the baseline. Neither it nor
    `interval` is there where neither seeds nor documents tell.
    """

    value: float | None
    interval: Estimate | None = None
    gain: Estimate | None = None

    @property
    def differs(self) -> bool:
        return self.gain is not None and not self.gain.low <= 0 <= self.gain.high


class Comparison(Frozen):
    """A comparison of methods that is at its end.

    Attributes:
        seconds: row to what it took, all seeds together.
        num_seeds: of each row; those that stayed undecided under a margin have more.
        verdicts: row to what a margin made of it.
    """

    question: str
    baseline: str
    headings: dict[str, str]
    figures: dict[str, dict[str, MethodFigure]]
    seconds: dict[str, float]
    num_seeds: int
    verdicts: dict[str, str] = {}  # noqa: RUF012 - never changed
    margin: str = ""


def comparison_report(found: Comparison, picture: Path) -> Report:
    figures, headings, num_seeds = found.figures, found.headings, found.num_seeds
    values = [
        [row, *(_spread(of_row[metric]) for metric in headings), f"{found.seconds[row]:.0f}"]
        for row, of_row in figures.items()
    ]
    others = {row: of_row for row, of_row in figures.items() if row != found.baseline}
    gains = [[row, *(_gain(of_row[metric]) for metric in headings)] for row, of_row in others.items()]
    mean = f"mean over {num_seeds} {'seed' if num_seeds == 1 else 'seeds'}"
    grids = [Grid(mean, ["", *headings.values(), "seconds, all seeds"], values)]
    notes = []
    if any(figure.gain is not None for of_row in figures.values() for figure in of_row.values()):
        title = f"difference from {found.baseline}, by seed, and by document where a column has a figure for each"
        grids.append(Grid(title, ["", *headings.values()], gains))
        notes.append(
            "Intervals are 95% of Student's t over seeds, or over documents where seeds differ by no more than those "
            "make them, each by itself; * marks one that excludes 0."
        )
    if num_seeds < FEWEST_SEEDS:
        notes.append(
            f"Only {num_seeds} of at least {FEWEST_SEEDS} seeds: what another draw of text to learn or calibrate on "
            "would change is hardly in these figures."
        )
    if found.verdicts:
        each = "; ".join(f"{row}: {verdict}" for row, verdict in found.verdicts.items())
        notes.append(f"Within {found.margin}, at 95% over all looks: {each}.")
    return Report(
        figures={
            "question": found.question,
            "baseline": found.baseline,
            "num_seeds": num_seeds,
            "rows_measured": {
                row: {metric: figure.model_dump() for metric, figure in of_row.items()}
                for row, of_row in figures.items()
            },
            "seconds": found.seconds,
            "verdicts": found.verdicts,
        },
        grids=grids,
        notes=notes,
        picture=draw_comparison(figures, headings, picture),
    )


def draw_comparison(rows: Mapping[str, Mapping[str, MethodFigure]], headings: Mapping[str, str], file: Path) -> Path:
    """Draw a panel a metric with a line a row: the mean over seeds, and its interval where there is one."""
    names, (width, _), num_across = list(rows), SIZE_INCHES, min(3, len(headings))
    num_down = -(-len(headings) // num_across)
    figure = new_figure((0.5 * width * (num_across + 1), num_down * (1.2 + 0.28 * len(names))))
    panels = figure.subplots(num_down, num_across, sharey=True, squeeze=False)
    for axes in panels.flat[len(headings) :]:
        axes.set_visible(False)
    for axes, (metric, heading) in zip(panels.flat, headings.items(), strict=False):
        means = [mean for of_row in rows.values() if (mean := of_row[metric].value) is not None]
        if means and min(means) > 0 and max(means) > WIDE * min(means):
            axes.set_xscale("log", nonpositive="clip")
            axes.set_xlim(min(means) / 2, max(means) * 4)
        for place, name in enumerate(names):
            one = rows[name][metric]
            if one.value is not None:
                axes.plot(one.value, place, color="tab:blue", marker="o")
            if one.interval is not None:
                axes.plot([one.interval.low, one.interval.high], [place, place], color="tab:blue", marker="|")
        axes.set_xlabel("\n".join(wrap(heading, HEADING_WIDTH)))
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].set_ylim(len(names) - 0.5, -0.5)
    return saved(figure, file)


def draw_tradeoffs(
    rows: Mapping[str, Mapping[str, MethodFigure]],
    headings: Mapping[str, str],
    quality: str,
    metrics: Sequence[str],
    file: Path,
) -> Path:
    """Draw a panel a metric with a point a row: the mean of the metric across, that of `quality` upwards.

    A row without a figure for either is left out of that panel. Qualities of which the largest is more than `WIDE`
    times the smallest are drawn on a logarithmic axis, with what is 0 at its foot.
    """
    width, height = SIZE_INCHES
    figure = new_figure((0.75 * width * len(metrics) + 2.6, 1.25 * height))
    panels = figure.subplots(1, len(metrics), squeeze=False, sharey=True).flat
    styles = row_styles(list(rows))
    named: dict[str, Any] = {}
    for axes, metric in zip(panels, metrics, strict=True):
        for name, of_row in rows.items():
            across, up = of_row[metric], of_row[quality]
            if across.value is None or up.value is None:
                continue
            colour, mark = styles[name]
            (named[name],) = axes.plot(
                across.value, up.value, color=colour, marker=mark, markersize=8, linestyle="none"
            )
            if across.interval is not None:
                axes.plot([across.interval.low, across.interval.high], [up.value] * 2, color=colour, linewidth=0.8)
            if up.interval is not None:
                axes.plot([across.value] * 2, [up.interval.low, up.interval.high], color=colour, linewidth=0.8)
        axes.set_xlabel("\n".join(wrap(headings[metric], HEADING_WIDTH)))
        axes.grid(alpha=0.3)
    known = sorted(value for of_row in rows.values() if (value := of_row[quality].value))
    if known and 0 < known[0] < known[-1] / WIDE:
        panels[0].set_yscale("symlog", linthresh=known[0])
        panels[0].set_ylim(bottom=-0.1 * known[0])
    panels[0].set_ylabel("\n".join(wrap(headings[quality], HEADING_WIDTH)))
    drawn = [name for name in rows if name in named]
    figure.legend([named[name] for name in drawn], drawn, loc="outside right upper")
    return saved(figure, file)


def row_styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return name to colour and mark, of which no two of a hundred names share both, nor two of ten neighbours one."""
    return {
        name: (f"C{place % 10}", MARKS[(place // 10 + place % 10) % len(MARKS)]) for place, name in enumerate(names)
    }


def number(value: float | None) -> str:
    """Return a figure in four digits, "–" for none."""
    return shown(value, ".4g" if value is None or abs(value) < 10_000 else ",.0f")


def _counted(interval: Estimate) -> bool:
    return isclose(interval.low, interval.high, rel_tol=1e-9)


def _spread(figure: MethodFigure) -> str:
    mean, interval = number(figure.value), figure.interval
    return mean if interval is None or _counted(interval) else f"{mean} ± {number(interval.high - interval.value)}"


def _gain(figure: MethodFigure) -> str:
    if (gain := figure.gain) is None:
        return NONE
    ends = f" ({number(gain.low)} to {number(gain.high)}){'*' if figure.differs else ''}"
    return number(gain.value) + ("" if _counted(gain) else ends)
