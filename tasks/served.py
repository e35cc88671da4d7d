"""Served requests, as far as acceptance goes: curves over them, swaps of the draft, and sums by domain and draft."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from infra.consent import QueryRow
from models.acceptance import Estimate, Trace, summarise
from models.params import Frozen

# A draft's name is stamped on a request when it starts, so those in flight at a swap come after later ones.
MAX_LATE = 64


class Served(Frozen):
    """One request whose answer was drafted.

    Attributes:
        number: its place among the requests, such as its row in the log.
        draft: version of the draft.
        trace: what was drafted and accepted.
        per_token_ms: time between tokens, None if it was not measured.
    """

    number: int
    draft: int
    trace: Trace
    per_token_ms: float | None


class Swap(NamedTuple):
    """The first request, by its number, that another draft drafted for."""

    number: int
    draft: int


class Group(Frozen):
    """The requests of one domain that one draft drafted for; the intervals are 95% and resample requests."""

    domain: str
    draft: int
    num_requests: int
    tau: Estimate
    rate: Estimate | None
    per_token_ms: float | None


def from_log(rows: Iterable[QueryRow]) -> list[Served]:
    """Keep the rows that say what was accepted; their order stays."""
    return [
        Served(
            number=row.seq,
            draft=row.draft_version,
            trace=Trace(
                request_id=row.id,
                token_ids=(),  # whether an output loops is not asked here
                drafted=tuple(row.drafted),
                accepted=tuple(row.accepted),
                domain=row.domain,
            ),
            per_token_ms=row.per_token_ms,
        )
        for row in rows
        if row.speculating and row.drafted and row.draft_version is not None
    ]


def from_answers(answers: Iterable[Mapping[str, Any]]) -> list[Served]:
    """Keep the answers that say what was accepted, numbered from 1 in their order.

    Args:
        answers: rows with domain, draft_version, drafted_per_step and accepted_per_step.
    """
    return [
        Served(
            number=number,
            draft=int(row["draft_version"]),
            trace=Trace(
                request_id=str(number),
                token_ids=(),
                drafted=tuple(row["drafted_per_step"]),
                accepted=tuple(row["accepted_per_step"]),
                domain=row["domain"],
            ),
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
        found.append(Swap(request.number, request.draft))
        seen.add(request.draft)
        current = request.draft
    return found


def curves(served: Sequence[Served], window: int) -> dict[str, list[list[tuple[float, float]]]]:
    """Return the running τ of each domain, one curve each time that a draft served.

    A mean over requests of two drafts would draw a swap as a slope.

    Args:
        served: in their order.
        window: requests that a mean runs over; a curve starts at a quarter of it, because the first few requests
            scatter so much that they would look like an effect of the swap.

    Returns:
        domain to curves of (number, τ).
    """
    takeovers = swaps(served)
    kept: dict[tuple[str, int, int], list[Served]] = {}
    for request in served:
        times_before = sum(swap.draft == request.draft and swap.number <= request.number for swap in takeovers)
        kept.setdefault((request.trace.domain, request.draft, times_before), []).append(request)
    drawn: dict[str, list[list[tuple[float, float]]]] = {}
    for (domain, _, _), requests in kept.items():
        drawn.setdefault(domain, []).append(_running(requests, window))
    return drawn


def groups(served: Sequence[Served]) -> list[Group]:
    """Sum up by domain and draft."""
    found: dict[tuple[str, int], list[Served]] = {}
    for request in served:
        found.setdefault((request.trace.domain, request.draft), []).append(request)
    return [_group(domain, draft, requests) for (domain, draft), requests in sorted(found.items())]


def _running(requests: Sequence[Served], window: int) -> list[tuple[float, float]]:
    points = []
    accepted = steps = 0
    for index, request in enumerate(requests):
        accepted += sum(request.trace.accepted)
        steps += len(request.trace.accepted)
        if index >= window:
            gone = requests[index - window].trace.accepted
            accepted -= sum(gone)
            steps -= len(gone)
        if index + 1 >= window // 4 or index + 1 == len(requests):
            points.append((float(request.number), 1 + accepted / steps))
    return points


def _group(domain: str, draft: int, requests: Sequence[Served]) -> Group:
    summary = summarise([request.trace for request in requests])
    assert summary.tau is not None  # each request has a step
    times_ms = [request.per_token_ms for request in requests if request.per_token_ms is not None]
    return Group(
        domain=domain,
        draft=draft,
        num_requests=len(requests),
        tau=summary.tau,
        rate=summary.rate,
        per_token_ms=median(times_ms) if times_ms else None,
    )
