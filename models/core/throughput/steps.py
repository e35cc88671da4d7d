"""What steps take, by number of sequences, and what they give, by passes of the draft and lengths that are verified.

Between points that are known the time is linear.

A proposal is as long as its chances are worth what its rows take, goodput × ms: the condition for the largest quotient
of tokens and time. What rows take is asked at the rows that the other sequences have on average, so that a single
sequence's step is expected to take what a step of that length does.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple, TypeVar

from models.core.throughput.running import NUM_PLACES, Lookup, Source

Count = TypeVar("Count", int, float)  # of tokens or passes: of a step, or the mean of several


class Curve(NamedTuple):
    """Steps of one number of sequences: ms of the target by rows a sequence, ascending, and of a pass of the draft."""

    num_sequences: int
    rows: tuple[float, ...]
    points: tuple[float, ...]
    draft: float | None = None

    def parts(self, rows: float) -> list[tuple[int, float]]:
        """Return which points the target's time at so many rows a sequence is made of, and how much of each."""
        after = bisect_right(self.rows, rows)
        if after == 0 or len(self.rows) == 1:
            return [(0, 1.0)]
        right = min(after, len(self.rows) - 1)
        low, high = self.rows[right - 1], self.rows[right]
        share = (rows - low) / (high - low)  # above 1 beyond the last: it goes on as steep as before
        return [(right - 1, 1 - share), (right, share)]

    def target_ms(self, rows: float) -> float:
        """Return f at so many rows a sequence."""
        return on_line(self.rows, self.points, rows)


class Line(NamedTuple):
    """What steps of one number of sequences take: ms of the target by rows, both ascending, and of a pass of the draft.

    `pass_ms` is None if there was no pass. The draft takes `prompt_ms` for the prompt tokens that come with each
    emitted one, none where it rests, and `read_ms` for those of the step that is planned.
    """

    num_sequences: int
    rows: list[float]
    ms: list[float]
    pass_ms: float | None
    one_pass: bool = False
    prompt_ms: float = 0.0
    read_ms: float = 0.0

    def target_ms(self, rows: float) -> float:
        """Return what so many rows take."""
        return on_line(self.rows, self.ms, rows)

    def step_ms(self, rows: float, num_passes: float) -> float:
        """Return what a step takes, rows and passes may be means; ValueError if no pass was ever measured."""
        return self.target_ms(rows) + self.passes_ms(num_passes)

    def passes_ms(self, num_passes: float) -> float:
        """Return what a step's passes of the draft take; see `step_ms`."""
        if not num_passes:
            return 0.0
        if self.pass_ms is None:
            raise ValueError(f"wanted the time of a step with {num_passes} passes, but none was ever measured")
        return passes_made(num_passes, self.one_pass) * self.pass_ms


def on_line(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Return a value at a place: linear between known ones, before them the first, beyond them as steep as the last."""
    after = bisect_right(places, place)
    if after == 0 or len(places) == 1:
        return values[0]
    right = min(after, len(places) - 1)
    low, start = places[right - 1], values[right - 1]
    return start + (place - low) / (places[right] - low) * (values[right] - start)


def passes_made(num_tokens: Count, one_pass: bool) -> Count:
    """Return how many passes of the draft say so many tokens."""
    return min(num_tokens, 1) if one_pass else num_tokens


def between(numbers: Sequence[int], number: int) -> list[tuple[int, float]]:
    """Return the places of the two nearest of ascending numbers, and how much each counts; outside, of one."""
    after = bisect_right(numbers, number)
    if not numbers or after == 0:
        return [(0, 1.0)] if numbers else []
    if after == len(numbers) or numbers[after - 1] == number:
        return [(after - 1, 1.0)]
    share = (number - numbers[after - 1]) / (numbers[after] - numbers[after - 1])
    return [(after - 1, 1 - share), (after, share)]


class Price(NamedTuple):
    """What time is worth.

    Attributes:
        goodput: tokens that a ms has to give.
        rows: of all sequences of a step together, on average.
    """

    goodput: float
    rows: float

    def of_lengths(self, line: Line) -> list[float]:
        """Return what the tokens of one sequence's proposal have to give, by how many there are, from 0 on."""
        first = self.rows * (1 - 1 / line.num_sequences) + 1
        start_ms = line.target_ms(first)
        return [self.goodput * (line.target_ms(first + length) - start_ms) for length in range(NUM_PLACES + 1)]


class Group(NamedTuple):
    """Sequences of which the same is known; of each proposal the chances that all tokens up to a place are accepted.

    `made` are the chances that the head's chain comes to a place before it ends by itself; all 1 where it is empty.
    """

    num: int
    domain: str
    whole: bool
    head: list[float]
    lookups: list[tuple[Lookup, int, list[float]]]
    made: Sequence[float] = ()

    def num_made(self, length: int) -> float:
        """Return how many tokens the head's chains of a length have on average."""
        return sum(self.made[:length]) if self.made else length


class Option(NamedTuple):
    """What a number of passes gives: `tokens` emitted in `ms`, with so many `rows` and lengths kept."""

    tokens: float
    ms: float
    rows: float
    longest: dict[tuple[str, Source, int], int]

    @property
    def goodput(self) -> float:
        """Tokens a ms."""
        return self.tokens / self.ms


_goodput = attrgetter("goodput")


def options_of(line: Line, groups: Sequence[Group], limit: int, price: Price | None) -> tuple[list[Option], Price]:
    """Return the best of each number of passes, from 0 to the limit, and the price at which it was found."""
    num = line.num_sequences
    nothing = {key: 0 for group in groups for key in _keys(group)}
    plain = Option(num, line.target_ms(num), num, nothing)
    price = price or Price(plain.goodput, num)
    options: list[Option] = []
    for _ in range(2):
        costs = price.of_lengths(line)
        found = [option_of(line, groups, passes, _longest(groups, passes, costs)) for passes in range(limit + 1)]
        options = [max(pair, key=_goodput) for pair in zip(found, options or [plain, *found[1:]], strict=True)]
        best, last = max(options, key=_goodput), price
        price = Price(best.goodput, best.rows)
        if abs(price.goodput - last.goodput) <= 0.1 * last.goodput:
            break
    return options, price


def _keys(group: Group) -> list[tuple[str, Source, int]]:
    """Return what the lengths of a group's proposals are called in a plan, the head's first."""
    lookups: list[tuple[str, Source, int]] = [(group.domain, "lookup", kind) for _, kind, _ in group.lookups]
    return [(group.domain, "head", int(not group.whole)), *lookups]


def _longest(groups: Sequence[Group], passes: int, costs: Sequence[float]) -> dict[tuple[str, Source, int], int]:
    """Return the lengths worth their rows: of the head up to its passes, of look-up 0 where the head is worth more."""
    longest: dict[tuple[str, Source, int], int] = {}
    for group in groups:
        head, *lookups = _keys(group)
        longest[head], worth = _best_length(group.head[:passes], costs, group.made)
        for key, (lookup, _, chances) in zip(lookups, group.lookups, strict=True):
            length, gain = _best_length(chances, costs)
            if lookup.num_tokens < length:
                _, gain = _best_length(chances[: lookup.num_tokens], costs)
            longest[key] = max(longest.get(key, 0), length if gain > worth else 0)
    return longest


def _best_length(chances: Sequence[float], costs: Sequence[float], made: Sequence[float] = ()) -> tuple[int, float]:
    """Return how many tokens of a proposal are worth most beyond their costs, and how much that is."""
    if made:  # rows that are not always there cost as much less
        steps = zip(made, pairwise(costs), strict=False)
        costs = list(accumulate((share * (more - less) for share, (less, more) in steps), initial=0.0))
    totals = accumulate(chances[: len(costs) - 1])
    worth = [0.0, *(total - cost for total, cost in zip(totals, costs[1:], strict=False))]
    most = max(worth)
    return worth.index(most), most


def option_of(line: Line, groups: Sequence[Group], passes: int, longest: dict[tuple[str, Source, int], int]) -> Option:
    """Return what a step gives on average in which these lengths are verified."""
    num = line.num_sequences
    tokens, rows, all_looked_up = float(num), float(num), 1.0
    cases: list[list[tuple[float, float]]] = []  # of a sequence of each group: chance and length of what is drafted
    for group in groups:
        head, *keys = _keys(group)
        rest = 1.0
        drafted: list[tuple[float, float]] = []
        for key, (lookup, _, chances) in zip(keys, group.lookups, strict=True):
            length = min(longest[key], lookup.num_tokens)
            if length:
                tokens += group.num * lookup.chance * sum(chances[:length])
                drafted.append((lookup.chance, length))
                rest -= lookup.chance
        tokens += group.num * rest * sum(group.head[: longest[head]])
        cases.append([*drafted, (rest, group.num_made(longest[head]))])
        rows += group.num * sum(chance * length for chance, length in cases[-1])
        all_looked_up *= max(1 - rest, 0.0)
    target_ms = 0.0
    for group, drafted in zip(groups, cases, strict=True):  # as one sequence of it varies, and the others don't
        others = rows - sum(chance * length for chance, length in drafted)
        target_ms += group.num / num * sum(chance * line.target_ms(others + length) for chance, length in drafted)
    # The first pass keeps the draft's keys, also where look-up proposes for every sequence.
    mean_passes = 1 + (_num_passes(groups, passes) - 1) * (1 - all_looked_up) if passes else 0
    prompts_ms = tokens * line.prompt_ms if passes else 0.0
    return Option(tokens, target_ms + line.passes_ms(mean_passes) + prompts_ms, rows, longest)


def _num_passes(groups: Sequence[Group], passes: int) -> float:
    """Return how many passes are made on average, each for as long as a chain goes on."""
    if not any(group.made for group in groups):
        return passes
    ended = [
        math.prod((1 - group.made[place] if group.made else 0.0) ** group.num for group in groups)
        for place in range(passes)
    ]
    return passes - sum(ended)


def everything(groups: Iterable[Group], passes: int) -> dict[tuple[str, Source, int], int]:
    """Return lengths at which nothing is cut off."""
    return {key: passes if key[1] == "head" else NUM_PLACES for group in groups for key in _keys(group)}
