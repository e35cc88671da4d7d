"""Figures of benchmarks, as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.views.acceptance import curves, from_answers, swaps
from models.types import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE_INCHES = (6.4, 3.6)


def new_figure(size_inches: tuple[float, float] = SIZE_INCHES) -> "Figure":
    from matplotlib.figure import Figure  # no pyplot: it keeps state and looks for a display

    return Figure(size_inches, layout="constrained")


def saved(figure: "Figure", file: Path) -> Path:
    figure.savefig(file, dpi=150)
    return file


def draw_refreshes(taus: Mapping[str, Sequence[Estimate]], marks: Sequence[str], file: Path) -> Path:
    """Draw τ with its intervals, before the first refresh and after each, over their marks into a PNG."""
    figure = new_figure()
    axes = figure.add_subplot(ylabel="τ, mean accepted length")
    for number, (domain, of_domain) in enumerate(taus.items()):
        places = [place + 0.05 * number for place in range(len(of_domain))]  # else the intervals hide each other
        ends = [[one.value - one.low for one in of_domain], [one.high - one.value for one in of_domain]]
        axes.errorbar(places, [one.value for one in of_domain], yerr=ends, marker="o", capsize=3, label=domain)
    axes.set_xticks(range(len(marks)), marks)
    axes.legend()
    return saved(figure, file)


def draw_acceptance(answers: Sequence[Mapping[str, Any]], window: int, file: Path) -> Path:
    """Draw τ over the requests that ended, a running mean a domain and draft, with each swap marked."""
    figure, served = new_figure(), from_answers(answers)
    axes = figure.add_subplot(xlabel="requests answered", ylabel=f"τ, mean of {window} requests")
    for domain, parts in sorted(curves(served, window).items()):
        for place, part in enumerate(parts):
            axes.plot(*zip(*part, strict=True), label=f"{domain}, {'new' if place else 'first'} draft", linewidth=1.5)
    for swap in swaps(served):
        axes.axvline(swap.number, color="black", linestyle="--", label="draft swapped")
    axes.legend()
    return saved(figure, file)


def draw_speeds(speeds: Mapping[str, Mapping[str, Mapping[str, float]]], x_label: str, file: Path) -> Path:
    """Draw a bar a side, the median, domain by domain, with a line from p10 to p90; each is a dumped `Spread`."""
    sides = list(dict.fromkeys(side for of_domain in speeds.values() for side in of_domain))
    width, height = SIZE_INCHES
    figure = new_figure((max(width, 2 * (1 + len(speeds))), height + 0.25 * len(sides)))
    figure.supxlabel(x_label)
    shared = figure.subplots(1, len(speeds), sharey=True, squeeze=False)[0]
    for axes, (domain, of_domain) in zip(shared, speeds.items(), strict=True):
        axes.set(title=domain)
        for place, side in enumerate(sides):
            if side in of_domain:
                one = of_domain[side]
                axes.barh(place, one["median"], xerr=[[one["median"] - one["p10"]], [one["p90"] - one["median"]]])
    shared[0].set_yticks(range(len(sides)), sides)
    shared[0].invert_yaxis()
    return saved(figure, file)


def draw_ratios(
    ratios: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]],
    limit: float,
    x_label: str,
    y_label: str,
    file: Path,
) -> Path:
    """Draw ratios over doubling numbers, a line a name with its intervals, domain by domain.

    A point is (number, ratio, lower end, upper end); no lower end is to fall below the limit.
    """
    figure = new_figure()
    shared = figure.subplots(1, len(ratios), sharey=True, squeeze=False)[0]
    for axes, (domain, of_domain) in zip(shared, ratios.items(), strict=True):
        axes.set(title=domain, xlabel=x_label)
        axes.set_xscale("log", base=2)
        for name, points in of_domain.items():
            numbers, values, lows, highs = map(list, zip(*points, strict=True))
            (line,) = axes.plot(numbers, values, label=name, marker="o")
            axes.fill_between(numbers, lows, highs, color=line.get_color(), alpha=0.2)
        ticks = sorted({point[0] for points in of_domain.values() for point in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.axhline(1, color="tab:gray", linewidth=0.8)
        axes.axhline(limit, color="black", linestyle="--", label=f"limit: {limit:g}")
    shared[0].set_ylabel(y_label)
    handles, labels = shared[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return saved(figure, file)


def draw_latency(points: Mapping[str, Sequence[tuple[float, float]]], x_label: str, file: Path) -> Path:
    figure = new_figure()
    axes = figure.add_subplot(xlabel=x_label, ylabel="inter-token latency, ms")
    for name, of_kind in points.items():
        axes.plot(*zip(*of_kind, strict=True), label=name, linestyle="", marker=".", markersize=3)
    axes.set_ylim(bottom=0)
    axes.legend()
    return saved(figure, file)
