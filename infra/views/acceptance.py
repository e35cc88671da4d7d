"""Served requests as far as acceptance goes: where another draft took over, and curves over them.

`curves` and `swaps` only count; the intervals of a `Group` are estimated by who fills the view.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from infra.consent import QueryRow
from infra.views.charts import Point
from models.types import Estimate, Frozen

# A draft's name is stamped on a request when it starts, so those in flight at a swap come after later ones.
MAX_LATE = 64


class Served(NamedTuple):
    """One request whose answer was drafted.

    `number` is its place among them, such as its row in the log; `time_ms` is when it was answered, None where that was
    not kept.
    """

    number: int
    draft: int
    domain: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    per_token_ms: float | None
    time_ms: int | None = None

    @property
    def at(self) -> float:
        """Its place on a chart's axis."""
        return float(self.number if self.time_ms is None else self.time_ms)


class Swap(NamedTuple):
    number: int
    draft: int
    at: float


class Group(Frozen):
    """The requests of one domain that one draft drafted for; the intervals are 95% and resample requests."""

    domain: str
    draft: int
    num_requests: int
    tau: Estimate
    rate: Estimate | None
    per_token_ms: float | None


class Acceptance(NamedTuple):
    served: Sequence[Served]
    groups: Sequence[Group]


def from_log(rows: Iterable[QueryRow]) -> list[Served]:
    """Keep the rows that say what was accepted of the draft alone; their order stays."""
    return [
        Served(row.seq, row.draft_version, row.domain, *steps, row.per_token_ms, row.time_ms)
        for row in rows
        if row.speculating
        and row.drafting == "head"
        and not row.structured
        and (steps := row.counted())[0]
        and row.draft_version is not None
        and row.seq is not None
    ]


def from_answers(answers: Iterable[Mapping[str, Any]]) -> list[Served]:
    """Keep the answers that say what was accepted, numbered from 1 in their order."""
    return [
        Served(
            number=number,
            draft=int(row["draft_version"]),
            domain=row["domain"],
            drafted=tuple(row["drafted_per_step"]),
            accepted=tuple(row["accepted_per_step"]),
            per_token_ms=None,
        )
        for number, row in enumerate(answers, start=1)
        if row["drafted_per_step"] and row["draft_version"]
    ]


def swaps(served: Sequence[Served]) -> list[Swap]:
    """Return where another draft took over.

    A draft that was not seen before takes over with its first request. One that was has come back only if the draft
    that served in between is gone; else its requests were in flight at the swap.
    """
    found: list[Swap] = []
    seen = {served[0].draft} if served else set()
    current = served[0].draft if served else None
    for index, request in enumerate(served):
        if request.draft == current:
            continue
        following = served[index + 1 : index + 1 + MAX_LATE]
        if request.draft in seen and any(later.draft == current for later in following):
            continue
        found.append(Swap(request.number, request.draft, request.at))
        seen.add(request.draft)
        current = request.draft
    return found


def curves(served: Sequence[Served], window: int) -> dict[str, list[list[Point]]]:
    """Return the running τ of each domain, one curve of (place, τ) each time that a draft served.

    A mean over requests of two drafts would draw a swap as a slope. A curve starts at a quarter of its `window` of
    requests, because the first few scatter so much that they would look like an effect of the swap.
    """
    takeovers = swaps(served)
    kept: dict[tuple[str, int, int], list[Served]] = {}
    for request in served:
        times_before = sum(swap.draft == request.draft and swap.number <= request.number for swap in takeovers)
        kept.setdefault((request.domain, request.draft, times_before), []).append(request)
    drawn: dict[str, list[list[Point]]] = {}
    for (domain, _, _), requests in kept.items():
        drawn.setdefault(domain, []).append(_running(requests, window))
    return drawn


def by_domain_and_draft(served: Iterable[Served]) -> dict[tuple[str, int], list[Served]]:
    found: dict[tuple[str, int], list[Served]] = {}
    for request in served:
        found.setdefault((request.domain, request.draft), []).append(request)
    return dict(sorted(found.items()))


def _running(requests: Sequence[Served], window: int) -> list[Point]:
    points = []
    accepted = steps = 0
    for index, request in enumerate(requests):
        accepted += sum(request.accepted)
        steps += len(request.accepted)
        if index >= window:
            gone = requests[index - window].accepted
            accepted -= sum(gone)
            steps -= len(gone)
        if index + 1 >= window // 4 or index + 1 == len(requests):
            points.append((request.at, 1 + accepted / steps))
    return points
