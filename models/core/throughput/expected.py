"""What a way of drafting is expected to give, from its steps and from what rows of the target take.

Of every step that was seen with as many drafted tokens as there may be, n were proposed and a accepted. With T(r), what
r rows of the target take, and D, what drafting took, at most K drafted tokens are expected to give

    Σ (1 + min(a, K)) / Σ (T(1 + min(n, K)) + D(min(n, K)) + rest)

tokens a second, and plain decoding 1 / (T(1) + rest), where `rest` is what a step takes besides both. D(k) goes on from
one drafted token to the next in a straight line, which is flat for a draft that looks up.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from models.core.throughput.steps import on_line
from models.types import Frozen, Positive


class Step(NamedTuple):
    """One step: how many tokens were proposed, and how many accepted."""

    proposed: int
    accepted: int


Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DraftingCost(NamedTuple):
    """ms that drafting takes: of the first token of a proposal, and of each one more."""

    first_ms: Milliseconds
    more_ms: Milliseconds = 0.0

    def ms(self, num_tokens: int) -> float:
        """Return D; a step for which nothing was found looked for it all the same."""
        return self.first_ms + self.more_ms * max(0, num_tokens - 1)


class Costs(Frozen):
    """What steps take on a machine; it can be brought along as a file.

    Attributes:
        device: the machine, in words.
        rows_ms: rows of the target, from 1, to ms of its pass.
        rest_ms: of a step besides target and draft.
        draft_ms: way of drafting to ms of its first token and of each one more. Ways that are missing take what they
            took where they were seen.
    """

    device: str = ""
    rows_ms: dict[Annotated[int, Field(ge=1)], Positive] = Field(min_length=1)
    rest_ms: float = Field(0.0, ge=0)
    draft_ms: dict[str, DraftingCost] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _are_times(self) -> Self:
        if 1 not in self.rows_ms:
            raise ValueError(f"rows_ms must tell what 1 row takes; it has {sorted(self.rows_ms)}")
        return self

    def target_ms(self, rows: int) -> float:
        """Return T."""
        known = sorted(self.rows_ms)
        return on_line(known, [self.rows_ms[number] for number in known], rows)


class Seen(NamedTuple):
    """What one way of drafting did on the sample, and what it took here.

    If `cut`, fewer tokens would have been the first of these: not so of a tree, nor where confidence ends it.
    """

    steps: Sequence[Step]
    drafting: DraftingCost
    cut: bool = True

    @property
    def most(self) -> int:
        """The most tokens that a step proposed."""
        return max((step.proposed for step in self.steps), default=0)


def expected_speedup(seen: Seen, most: int, costs: Costs, way: str) -> float:
    """Return how many times plain decoding's tokens a second are expected with at most so many drafted tokens."""
    drafting = costs.draft_ms.get(way, seen.drafting)
    tokens = sum(1 + min(step.accepted, most) for step in seen.steps)
    sizes = [min(step.proposed, most) for step in seen.steps]
    ms = sum(costs.target_ms(1 + size) + drafting.ms(size) + costs.rest_ms for size in sizes)
    return tokens / ms * (costs.target_ms(1) + costs.rest_ms)


class Option(NamedTuple):
    """A way of drafting with a number of tokens, and what it is expected to give, in times plain decoding."""

    way: str
    num_draft_tokens: int
    speedup: float


def ranked(seen: Mapping[str, Seen], sizes: Iterable[int], costs: Costs) -> list[Option]:
    """Return every way with the number of tokens that is best for it, of `sizes` or its own, the fastest first."""
    found = []
    for way, one in seen.items():
        choices = [size for size in sizes if size <= one.most] if one.cut else []
        options = [Option(way, size, expected_speedup(one, size, costs, way)) for size in choices or [max(1, one.most)]]
        found.append(max(options, key=lambda option: option.speedup))
    return sorted(found, key=lambda option: -option.speedup)


def read_costs(file: Path) -> Costs:
    """Read a table of the form that `redraft advise` writes; ValueError if the file can't be read, or is none."""
    try:
        return Costs.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--costs: {file} can't be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"--costs: {file}{f', {place}' if place else ''}: {first['msg']}") from error


def acceptance_by_place(steps: Sequence[Step]) -> list[float]:
    """Return for each place the share of steps that accepted so many tokens, up to the last that any did."""
    most = max((step.accepted for step in steps), default=0)
    return [fmean(step.accepted >= place for step in steps) for place in range(1, most + 1)]
