"""What a step of a batch gives, and in what time, by the passes of the draft and the lengths that are verified.

Here a proposal is as long as its chances are worth what its rows take, goodput × ms: the condition for the largest
quotient of tokens and time. What rows take is asked at the rows that the other sequences have on average, so that a
single sequence's step is expected to take what a step of that length does.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from models.core.throughput.curves import Line
from models.core.throughput.running import NUM_PLACES, Lookup, Source


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
    """Sequences of which the same is known; of each proposal the chances that all tokens up to a place are accepted."""

    num: int
    domain: str
    whole: bool
    head: list[float]
    lookups: list[tuple[Lookup, int, list[float]]]


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
        longest[head], worth = _best_length(group.head[:passes], costs)
        for key, (lookup, _, chances) in zip(lookups, group.lookups, strict=True):
            length, gain = _best_length(chances, costs)
            if lookup.num_tokens < length:
                _, gain = _best_length(chances[: lookup.num_tokens], costs)
            longest[key] = max(longest.get(key, 0), length if gain > worth else 0)
    return longest


def _best_length(chances: Sequence[float], costs: Sequence[float]) -> tuple[int, float]:
    """Return how many tokens of a proposal are worth most beyond their costs, and how much that is."""
    totals = accumulate(chances[: len(costs) - 1])
    worth = [0.0, *(total - cost for total, cost in zip(totals, costs[1:], strict=False))]
    most = max(worth)
    return worth.index(most), most


def option_of(line: Line, groups: Sequence[Group], passes: int, longest: dict[tuple[str, Source, int], int]) -> Option:
    """Return what a step gives on average in which these lengths are verified."""
    num = line.num_sequences
    tokens, rows, all_looked_up = float(num), float(num), 1.0
    cases: list[list[tuple[float, int]]] = []  # of a sequence of each group: chance and length of what is drafted
    for group in groups:
        head, *keys = _keys(group)
        rest, drafted = 1.0, []
        for key, (lookup, _, chances) in zip(keys, group.lookups, strict=True):
            length = min(longest[key], lookup.num_tokens)
            if length:
                tokens += group.num * lookup.chance * sum(chances[:length])
                drafted.append((lookup.chance, length))
                rest -= lookup.chance
        tokens += group.num * rest * sum(group.head[: longest[head]])
        cases.append([*drafted, (rest, longest[head])])
        rows += group.num * sum(chance * length for chance, length in cases[-1])
        all_looked_up *= max(1 - rest, 0.0)
    target_ms = 0.0
    for group, drafted in zip(groups, cases, strict=True):  # as one sequence of it varies, and the others don't
        others = rows - sum(chance * length for chance, length in drafted)
        target_ms += group.num / num * sum(chance * line.target_ms(others + length) for chance, length in drafted)
    # The first pass keeps the draft's keys, also where look-up proposes for every sequence.
    mean_passes = 1 + (passes - 1) * (1 - all_looked_up) if passes else 0
    prompts_ms = tokens * line.prompt_ms if passes else 0.0
    return Option(tokens, target_ms + line.passes_ms(mean_passes) + prompts_ms, rows, longest)


def everything(groups: Iterable[Group], passes: int) -> dict[tuple[str, Source, int], int]:
    """Return lengths at which nothing is cut off."""
    return {key: passes if key[1] == "head" else NUM_PLACES for group in groups for key in _keys(group)}
