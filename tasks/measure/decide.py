"""Whether a row differs from the baseline, is level with it within a margin, or more seeds are needed.

Differences are paired by seed, whose draws of documents all rows share, and by document where a metric has one figure
for each; see `models.core.evaluation.spread`. They are looked at several times while seeds are added, so that each look
has its share of the error: with L looks an interval is Student's at 1 − α / L. It tells levelness where it lies within
±margin, however sure a difference is that makes none to anybody, and else a difference where it leaves out 0.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from models.core.evaluation.spread import differences, spread
from tasks.measure.comparisons import Metrics

ALPHA = 0.05
MOST_TOLD = 10_000  # seeds beyond which the number is no use to anybody
Verdict = Literal["differs", "level", "undecided"]


class Margin(NamedTuple):
    """What makes no difference to anybody, and how many seeds may go into showing that."""

    metric: str
    value: float
    most_seeds: int


def parse_margin(text: str, most_seeds: int) -> Margin:
    """Read "kl 0.05"; ValueError if it is not a column's name and a number above 0."""
    metric, _, value = text.strip().rpartition(" ")
    with suppress(ValueError):
        if metric and float(value) > 0:
            return Margin(metric, float(value), most_seeds)
    raise ValueError(f'--margin: wanted a column\'s name and a number above 0, such as "kl 0.05"; got "{text}"')


def decided(cells: Mapping[str, Sequence[Metrics]], baseline: str, margin: Margin, num_looks: int) -> dict[str, str]:
    """Return row to "differs" or "level", where that is known, or to "no figure", which no seed would change."""
    known = differences_from(cells, baseline, margin.metric)
    found: dict[str, str] = {row: decide(of_row, margin.value, num_looks) for row, of_row in known.items()}
    found |= dict.fromkeys(cells.keys() - known.keys() - {baseline}, "no figure")
    return {row: verdict for row, verdict in found.items() if verdict != "undecided"}


def needed(cells: Mapping[str, Sequence[Metrics]], baseline: str, margin: Margin, num_looks: int) -> dict[str, str]:
    """Return each row to how many more seeds it needs, in words; see `decided`."""
    told = {}
    for row, of_row in differences_from(cells, baseline, margin.metric).items():
        more = seeds_needed(of_row, margin.value, num_looks)
        number = "far" if more is None else f"about {more}"
        told[row] = f"undecided, needs {number} more {'seed' if more == 1 else 'seeds'}"
    return told


def looks(first: int, most: int) -> list[int]:
    """Return after how many seeds to look: the first, then half as many more each time, and `most`."""
    found = [first]
    while found[-1] < most:
        found.append(min(most, math.ceil(1.5 * found[-1])))
    return found


def decide(found: Sequence[float], margin: float, num_looks: int) -> Verdict:
    """Say what differences, row − baseline for each seed, show; of type `Mean` where documents are paired."""
    of_all = spread(found)
    mean, reach = abs(of_all.mean), of_all.reach(1 - ALPHA / num_looks)
    if mean + reach < margin:
        return "level"
    return "differs" if mean > reach else "undecided"


def seeds_needed(found: Sequence[float], margin: float, num_looks: int) -> int | None:
    """Return about how many more seeds would decide, if mean and deviation stay; None for more than anybody runs."""
    of_all = spread(found)
    if math.isnan(of_all.variance):
        return None
    wanted = max(abs(of_all.mean), margin - abs(of_all.mean))
    counts = range(of_all.num_seeds, MOST_TOLD)
    enough = next((count for count in counts if of_all.reach(1 - ALPHA / num_looks, count) < wanted), None)
    return None if enough is None else max(1, enough - of_all.num_seeds)


def differences_from(cells: Mapping[str, Sequence[Metrics]], baseline: str, metric: str) -> dict[str, list[float]]:
    """Return row to its differences from the baseline, by seed; rows of which one has no figure are left out."""
    found = {}
    for row, of_row in cells.items():
        sides = of_row, cells[baseline][: len(of_row)]
        values, bases = ([value for one in some if (value := one[metric]) is not None] for some in sides)
        if row != baseline and len(values) == len(bases) == len(of_row):
            found[row] = differences(values, bases)
    return found
