"""Whether a row differs from the baseline, is level with it within a margin, or more seeds are needed.

Differences are paired by seed, whose draws of documents all rows share, and taken as normal. They are looked at several
times while seeds are added, so that each look has its share of the error: with L looks an interval is Student's at
1 − α / L. It tells a difference where it leaves out 0, and levelness where it lies within ±margin.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from scipy.stats import t as student

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
    """Return row to "differs" or "level", where that is known, or to "no figure", which no seed would change.

    Args:
        cells: row to its metrics, a seed each, the first ones of the baseline's.
        baseline: the row the others are compared with.
        margin: of which metric, and how much.
        num_looks: how often rows are looked at in all.
    """
    differences = _differences(cells, baseline, margin.metric)
    found = {row: decide(of_row, margin.value, num_looks) for row, of_row in differences.items()}
    none = dict.fromkeys(cells.keys() - differences.keys() - {baseline}, "no figure")
    return {row: verdict for row, verdict in found.items() if verdict != "undecided"} | none


def needed(cells: Mapping[str, Sequence[Metrics]], baseline: str, margin: Margin, num_looks: int) -> dict[str, str]:
    """Return each row to how many more seeds it needs, in words; see `decided`."""
    told = {}
    for row, differences in _differences(cells, baseline, margin.metric).items():
        more = seeds_needed(differences, margin.value, num_looks) if len(differences) > 1 else None
        told[row] = f"undecided, needs {'far' if more is None else f'about {more}'} more seeds"
    return told


def looks(first: int, most: int) -> list[int]:
    """Return after how many seeds to look: the first, then half as many more each time, and `most`."""
    found = [first]
    while found[-1] < most:
        found.append(min(most, math.ceil(1.5 * found[-1])))
    return found


def decide(differences: Sequence[float], margin: float, num_looks: int) -> Verdict:
    """Say what differences show.

    Args:
        differences: row − baseline, one a seed.
        margin: how much makes no difference to anybody.
        num_looks: how often they are looked at in all.
    """
    mean, reach = _interval(differences, num_looks)
    if abs(mean) > reach:
        return "differs"
    return "level" if abs(mean) + reach < margin else "undecided"


def seeds_needed(differences: Sequence[float], margin: float, num_looks: int) -> int | None:
    """Return about how many more seeds would decide, if mean and deviation stay; None for more than anybody runs."""
    mean = abs(sum(differences) / len(differences))
    wanted, deviation = max(mean, margin - mean), _deviation(differences)
    for count in range(len(differences), MOST_TOLD):
        if _quantile(count, num_looks) * deviation / math.sqrt(count) < wanted:
            return max(1, count - len(differences))
    return None


def _differences(cells: Mapping[str, Sequence[Metrics]], baseline: str, metric: str) -> dict[str, list[float]]:
    """Return row to its differences from the baseline, by seed; rows of which one has no figure are left out."""
    found = {}
    for row, of_row in cells.items():
        pairs = [(one[metric], base[metric]) for one, base in zip(of_row, cells[baseline], strict=False)]
        known = [value - base for value, base in pairs if value is not None and base is not None]
        if row != baseline and len(known) == len(pairs):
            found[row] = known
    return found


def _interval(differences: Sequence[float], num_looks: int) -> tuple[float, float]:
    """Return the mean and what the interval reaches to either side; infinite for a single difference."""
    count = len(differences)
    reach = math.inf
    if count > 1:
        reach = _quantile(count, num_looks) * _deviation(differences) / math.sqrt(count)
    return sum(differences) / count, reach


def _quantile(count: int, num_looks: int) -> float:
    return float(student.ppf(1 - ALPHA / num_looks / 2, count - 1))


def _deviation(differences: Sequence[float]) -> float:
    mean = sum(differences) / len(differences)
    return math.sqrt(sum((one - mean) ** 2 for one in differences) / (len(differences) - 1))
