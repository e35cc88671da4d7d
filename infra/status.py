"""What a service says of itself, typed, so that every reader asks for its fields by name.

The service sends `ServiceStatus` as JSON from /redraft/status. Each field describes itself for the generated reference.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Self

from pydantic import Field, ValidationError

from infra.events import EventCounts
from models.types import Frozen, Speed, ThroughputEstimate


class Phase(StrEnum):
    """Where a replica stands with its draft.

    Attributes:
        EMPTY: it was started without one, and speculation is off.
        UNPROVEN: its draft is used and has not passed probation since the start.
        PROVING: that draft is on probation.
        SERVING: its draft has passed probation.
        CHECKING: it is asked the canary prompts.
        TRYING: another draft is being swapped in and put on probation.
        REVERTING: the last good draft is being put back.
        OFF: no good draft is left, and speculation is off until one comes.
    """

    EMPTY = "empty"
    UNPROVEN = "unproven"
    PROVING = "proving"
    SERVING = "serving"
    CHECKING = "checking"
    TRYING = "trying"
    REVERTING = "reverting"
    OFF = "off"


class Proof(Frozen):
    """What a draft showed on probation."""

    weight_error: float = Field(description="largest relative difference from the file's weights on fixed inputs")
    num_near_ties: int = Field(
        description="golden outputs that first differ where the target itself was undecided between two tokens"
    )
    tau: float = Field(description="mean accepted length on the golden prompts")
    promised_tau: float = Field(description="the same, measured before the draft was registered")


class RecentAcceptance(Frozen):
    """Acceptance of the last requests of a domain or of a context length."""

    requests: int = Field(description="number of requests that the figures are over, the last 64 at most")
    acceptance_rate: float | None = Field(description="accepted / drafted tokens; null if nothing was drafted")
    mean_accepted_length: float = Field(description="tokens a verification step yields, 1.0 is no gain")

    @classmethod
    def of(cls, counts: Sequence[tuple[int, int, int]]) -> Self:
        """Sum up verification steps, drafted and accepted tokens of requests, of which there is one at least."""
        steps, drafted, accepted = map(sum, zip(*counts, strict=True))
        rate = accepted / drafted if drafted else None
        return cls(requests=len(counts), acceptance_rate=rate, mean_accepted_length=1 + accepted / steps)


class LogCounts(Frozen):
    """What became of the rows that the service wanted logged."""

    written: int = Field(description="rows written to the query log since the start")
    dropped: int = Field(description="rows lost since the start: the queue was full or the log refused them")
    unlogged: int = Field(description="of the last 256 requests, those that may not be logged at all")
    last_error: str | None = Field(description="why the log refused rows last")


class ServiceStatus(Frozen):
    """What /redraft/status answers: one replica, its draft and its counts since its start.

    A draft's name is its number in the registry and the start of its digest, such as "3-0123456789ab".
    """

    replica: str = Field(description="which of several replicas answers; empty if there is one alone")
    phase: Phase = Field(description="where the replica stands with its draft")
    champion: int | None = Field(description="draft that the registry named last; null without one")
    draft_version: int | None = Field(description="draft in the engine; null without one")
    speculating: bool = Field(description="whether the draft is used")
    throughput: ThroughputEstimate | None = Field(description="how steps are drafted; null before one was planned")
    speed: dict[str, Speed] = Field(description="how fast requests are decoded, by domain, against no speculation")
    mode: str = Field(description="whether the engine is compiled or eager, and why")
    unplanned: str | None = Field(
        description="why each step drafts the same number of tokens and nothing is looked up; null where steps are "
        "planned, or nothing is drafted"
    )
    fallback: str | None = Field(description="why speculation must be off; null while it may be on")
    fault: str | None = Field(description="what the canary prompts showed of a broken draft or engine; null if nothing")
    failed_tasks: dict[str, str] = Field(
        {}, description="background tasks of the service that failed, and the class of the exception; its log has more"
    )
    replacement: str | None = Field(description="why another replica must take over; null while none must")
    swaps: int = Field(description="drafts swapped in since the start")
    swap_ms: float | None = Field(description="milliseconds that the last swap took")
    proof: Proof | None = Field(description="what the draft in the engine showed on probation; null before")
    refused: dict[str, str] = Field(description="drafts that are not tried again, by name, and why")
    postponed: dict[str, str] = Field(description="drafts that are tried again later, by name, with reason and wait")
    reconciler: dict[str, int] = Field(description="how often the draft loop did what, by kind of event")
    acceptance: dict[str, RecentAcceptance] = Field(
        description="acceptance of the present draft in requests that it drafted alone, by domain"
    )
    acceptance_by_context: dict[str, RecentAcceptance] = Field(
        description="the same by the requests' tokens, prompt and answer: of up to so many, and `longer` ones"
    )
    longest_context: int = Field(description="tokens of the longest of the last 256 requests, prompt and answer")
    coverage: dict[str, float] = Field(
        description="share of the last 64 answers' tokens that the draft's vocabulary has, by domain; a token that it "
        "lacks is always rejected; empty where it has every token"
    )
    log: LogCounts = Field(description="rows for the query log")
    captured: dict[str, int] = Field(
        description="requests whose hidden states were `written` for a refresh since the start, and those whose were "
        "not, by why"
    )
    events: EventCounts = Field(description="events for the orchestrator")
    tokens: int = Field(description="completion tokens served since the start")
    accepted: dict[str, int] = Field(
        description="those of them that were drafted: by the draft, `head`, and looked up in earlier text, `lookup`; "
        "either way in answers that a grammar constrained, `structured`"
    )
    seeded: int = Field(description="answers to a seed and a temperature that were begun without drafts")
    requests: dict[str, int] = Field(description="answers since the start, by HTTP status")
    in_flight: int = Field(description="requests that are being answered")
    target_version: int = Field(description="the target's number in the registry, 0 if it has none")
    served_name: str = Field(description="the model's name in requests")
    uptime_s: float = Field(description="seconds since the start")

    def drafts_with(self, number: int) -> bool:
        return self.draft_version == number

    def has_proven(self, number: int) -> bool:
        return self.speculating and self.proof is not None and self.drafts_with(number)

    @property
    def untried(self) -> dict[str, str]:
        """The drafts that are not served and why, refused and postponed ones together."""
        return self.refused | self.postponed


class RunningService(ServiceStatus):
    """A service's status, with the place where it was found."""

    url: str = Field(description="address of the service, without /v1")


def of_domains(speeds: Mapping[str, Speed]) -> dict[str, Speed]:
    """Return speeds by name, without those of what the service asks itself, such as canary prompts: of no domain."""
    return {name: speed for name, speed in sorted(speeds.items()) if name.partition("/")[0]}


def parse_status(content: bytes, url: str) -> RunningService:
    """Read what the service at a URL, without /v1, answered; ValueError if this version of redraft does not know it."""
    try:
        return RunningService.model_validate({**json.loads(content), "url": url})
    except (ValueError, TypeError) as error:
        wrong = (
            {str(fault["loc"][0]) for fault in error.errors()} if isinstance(error, ValidationError) else {"no JSON"}
        )
        raise ValueError(
            f"{url}/redraft/status is not what this version of redraft expects ({', '.join(sorted(wrong))}); "
            "if the service was started by an older version, restart it"
        ) from error
