"""Views: what people are shown, of typed plain data. Charts, the report, gate reports, tables of results.

A view asks nobody and computes nothing that it does not show. What it is given is defined here, so that commands, tasks
and services can all fill it.
"""

from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict

MEANING = "τ is the mean accepted length, 1 + accepted draft tokens / verification steps"


class Shown(BaseModel):
    """The base of what views are given: can't be changed, takes no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimated(Protocol):
    """A figure with an interval, whoever estimated it."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


class Interval(Shown):
    """A figure and the ends of its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, found: Estimated) -> Self:
        """Return an estimate as it is shown."""
        return cls(value=found.value, low=found.low, high=found.high)

    def times(self, factor: float) -> "Interval":
        """Return it in another unit, such as per cent; the factor is positive."""
        return Interval(value=factor * self.value, low=factor * self.low, high=factor * self.high)

    def text(self, form: str) -> str:
        """Return it in words, each number by a format such as ".2f"."""
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"
