"""The form to choose under bounds such as "110 MiB, KL 0.1", and the tables of a recipe that make it."""

import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

from infra.artifacts import open_artifact
from infra.views.comparison import Comparison, MethodFigure, number
from infra.views.results import Report
from models.params import did_you_mean
from models.recipe import Recipe, toml
from tasks.prepare_target import prepare_target

# Word to the metric that it bounds, and "most" or "least".
Bounds = Mapping[str, tuple[str, str]]


class Bound(NamedTuple):
    spelt: str
    metric: str
    side: str
    value: float

    def holds(self, value: float | None) -> bool:
        return value is not None and (value <= self.value if self.side == "most" else value >= self.value)

    def straddled(self, figure: MethodFigure) -> bool:
        interval = figure.interval
        return interval is not None and self.holds(interval.low) != self.holds(interval.high)


class Fit(NamedTuple):
    """Which rows fit, the best first; which of them are level with the winner; and row to the bounds it may keep to."""

    winner: str | None
    fitting: list[str]
    level: list[str]
    open: dict[str, list[str]]


def parse_bounds(text: str, words: Bounds) -> list[Bound]:
    """Read "110 MiB, KL 0.1": a number and one of `words` each, in either order; ValueError names what is not that."""
    spelt = {word.casefold(): word for word in words} | {"tau": "τ"}
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        figure = re.search(r"(?<![\w.])\d+(\.\d+)?", part)
        word = " ".join((part[: figure.start()] + part[figure.end() :]).split()) if figure else part
        if figure is None or (known := spelt.get(word.casefold())) is None or known not in words:
            raise ValueError(f'--fit: "{part}" is no number with one of its words{did_you_mean(word, words)}')
        metric, side = words[known]
        found.append(Bound(part, metric, side, float(figure[0])))
    if not found:
        raise ValueError(f"--fit asks for nothing; say for example 110 {next(iter(words))}")
    return found


def choose(rows: Mapping[str, Mapping[str, MethodFigure]], bounds: Sequence[Bound], best: str) -> Fit:
    """Return which rows keep to all bounds by their means, and the one of them with the highest mean of `best`."""
    fits = [row for row, found in rows.items() if all(bound.holds(found[bound.metric].value) for bound in bounds)]
    fits.sort(key=lambda row: rows[row][best].value or 0.0, reverse=True)
    unsure = {
        row: [bound.spelt for bound in bounds if bound.straddled(found[bound.metric])] for row, found in rows.items()
    }
    level = [row for row in fits[1:] if _reaches(rows[row][best], rows[fits[0]][best])]
    return Fit(fits[0] if fits else None, fits, level, {row: spelt for row, spelt in unsure.items() if spelt})


def told(fit: Fit, rows: Mapping[str, Mapping[str, MethodFigure]], best: str, heading: str) -> str:
    """Say what was chosen and how sure that is, a sentence or two."""
    if fit.winner is None:
        return "nothing fits" + (f"; undecided: {_open(fit.open)}" if fit.open else "") + "."
    said = f"{fit.winner} fits, at {number(rows[fit.winner][best].value)} ({heading})"
    if fit.level:
        known = rows[fit.winner][best].interval is not None
        how = "level with it by their intervals" if known else "more seeds would tell whether it is ahead of"
        said += f"; {how}: {', '.join(fit.level)}"
    if fit.open:
        said += f"; more seeds would tell whether these fit: {_open(fit.open)}"
    return said + "."


def fitted(
    report: Report, found: Comparison, comparison: ModuleType, bounds: Sequence[Bound], recipe: Recipe, budget: float
) -> Report:
    fit = choose(found.figures, bounds, comparison.WINS_BY)
    said = told(fit, found.figures, comparison.WINS_BY, found.headings[comparison.WINS_BY])
    notes = [*report.notes, f"Asked for: {', '.join(bound.spelt for bound in bounds)}: {said}"]
    if fit.winner is not None:
        row = next(row for row in comparison.rows(budget) if row.name == fit.winner)
        tables = comparison.recipe_tables(row, open_artifact(prepare_target.fn(recipe.target)))
        lines = toml(tables) or "# the target as it is"
        notes += [f"To be pasted into recipe {recipe.name}:", "", "```toml", lines, "```", ""]
    return report.model_copy(update={"notes": notes, "figures": {**report.figures, "fit": fit._asdict()}})


def _reaches(figure: MethodFigure, winner: MethodFigure) -> bool:
    return figure.interval is None or winner.interval is None or figure.interval.high >= winner.interval.low


def _open(found: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{row} ({', '.join(spelt)})" for row, spelt in found.items())
