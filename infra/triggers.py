"""Why a refresh is wanted, domain by domain: states, events, and which state follows from which.

    ok → fallen → due → running → ok, or fallen again with a longer wait

Acceptance that fell is a state and no message: it stays until a draft was promoted or acceptance is back, whoever is
down meanwhile. So is acceptance that was never there to lose, of a domain that is "low": no draft has learnt it, or
none well. It stays until a draft promises enough of it; one that was promoted and does not counts as a failed run.
`infra.trigger_store` keeps both. Times are of the wall clock, since they must outlive processes; a clock that is set
back makes a wait begin anew, so no wait is ever longer than `Retry.most_s`.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from models.types import Frozen

Result = Literal["promoted", "progress", "outdated", "deferred", "failed"]
Why = Literal["fell", "low"]


class Retry(Frozen):
    """How long a domain waits after a run that promoted nothing: at first `first_s`, twice as long each time."""

    first_s: float = Field(gt=0)
    most_s: float = Field(gt=0)

    def after(self, attempts: int) -> float:
        return min(self.most_s, self.first_s * 2.0 ** min(attempts - 1, 62))


class Fall(Frozen):
    """A domain whose served τ is short of what its draft was promoted for or, if it is "low", of other domains' τ.

    Attributes:
        promised: τ at the gate; if it is "low", what is usual in the other domains.
        attempts: runs that promoted nothing since.
        wait_from_ms, wait_s: when the present wait began, and how long it is; 0 if there is none.
    """

    draft: int
    promised: float
    served: float
    since_ms: int
    attempts: int = 0
    wait_from_ms: int = 0
    wait_s: float = 0.0
    why: Why = "fell"

    def told(self, domain: str) -> str:
        if self.why == "low":
            return f"{domain} has τ {self.served:.2f}, {self.promised:.2f} is usual"
        return f"{domain} fell to τ {self.served:.2f}, {self.promised:.2f} was promised"

    def remaining_s(self, now_ms: int) -> float:
        return min(self.wait_s, max(0.0, self.wait_s - (now_ms - self.wait_from_ms) / 1000))


class Ok(Frozen):
    """Nothing is wanted."""

    state: Literal["ok"] = "ok"


class Fallen(Frozen):
    """A refresh is wanted, and too few rows are there or the wait is not over."""

    state: Literal["fallen"] = "fallen"
    fall: Fall


class Due(Frozen):
    """A refresh is asked for until one starts."""

    state: Literal["due"] = "due"
    fall: Fall


class Running(Frozen):
    """A refresh that was started after the fall is at work."""

    state: Literal["running"] = "running"
    fall: Fall


State = Ok | Fallen | Due | Running
STATE: TypeAdapter[State] = TypeAdapter(Annotated[State, Field(discriminator="state")])


class Fell(Frozen):
    """A domain is below what its draft promised, or "low"; told at every look, not once.

    `attempts` are failed ones of other low domains: no name that a client makes up starts anew.
    """

    draft: int
    promised: float
    served: float
    now_ms: int
    why: Why = "fell"
    attempts: int = 0

    def as_fall(self) -> Fall:
        return Fall(since_ms=self.now_ms, **self.model_dump(exclude={"now_ms"}))


class Recovered(Frozen):
    """A domain is where its draft promised it to be, or is "low" no more."""

    why: Why = "fell"


class Looked(Frozen):
    """Somebody looked whether a refresh is worth its while: whether enough rows wait."""

    enough: bool
    now_ms: int


class Started(Frozen):
    """A refresh acknowledged the wish, whoever started it."""


class Ended(Frozen):
    """That refresh ended.

    "progress" learned and goes on with the next rows; "outdated": the champion was replaced meanwhile; "deferred" did
    nothing or was stopped; "failed" was refused or failed, or a person must approve of its draft.
    """

    result: Result
    now_ms: int
    retry: Retry


class Lost(Frozen):
    """That refresh is gone without a word."""

    now_ms: int
    retry: Retry


Event = Fell | Recovered | Looked | Started | Ended | Lost


def step(state: State, event: Event) -> State:
    """Return what a state becomes by an event; what an event says nothing about stays."""
    match state, event:
        case Ok(), Fell():
            return Fallen(fall=event.as_fall())
        case Fallen(fall=fall) | Due(fall=fall), Fell(why="low") if (fall.why, fall.draft) != ("low", event.draft):
            told = event.model_dump(include={"draft", "promised", "served", "why"})
            return state.model_copy(update={"fall": fall.model_copy(update=told)})  # what was tried did not help it
        case Fallen(fall=fall) | Due(fall=fall), Fell() if (
            fall.why == event.why == "fell" and fall.draft != event.draft
        ):
            return Fallen(fall=event.as_fall())  # what was tried was tried against another draft
        case Fallen(fall=fall) | Due(fall=fall), Recovered() if fall.why == event.why:
            return Ok()
        case Fallen(fall=fall) | Due(fall=fall), Looked():
            if fall.wait_s and event.now_ms < fall.wait_from_ms:  # the clock was set back: the wait begins now
                fall = fall.model_copy(update={"wait_from_ms": event.now_ms})
            return Due(fall=fall) if event.enough and not fall.remaining_s(event.now_ms) else Fallen(fall=fall)
        case Fallen(fall=fall) | Due(fall=fall), Started():
            return Running(fall=fall)
        case Running(fall=fall), Ended():
            return _ended(fall, event)
        case Running(fall=fall), Lost():
            return _failed(fall, event)
    return state


def _ended(fall: Fall, event: Ended) -> State:
    match event.result:
        case "promoted" if fall.why == "fell":
            return Ok()
        case "progress" | "outdated":
            return Fallen(fall=fall.model_copy(update={"wait_s": 0.0}))
        case "deferred":
            if fall.remaining_s(event.now_ms) >= event.retry.first_s:
                return Fallen(fall=fall)
            return Fallen(fall=fall.model_copy(update={"wait_from_ms": event.now_ms, "wait_s": event.retry.first_s}))
        case "failed" | "promoted":  # a low domain is low no more once the new draft's promise says so
            return _failed(fall, event)


def _failed(fall: Fall, event: Ended | Lost) -> Fallen:
    wait_s = event.retry.after(fall.attempts + 1)
    changed = {"attempts": fall.attempts + 1, "wait_from_ms": event.now_ms, "wait_s": wait_s}
    return Fallen(fall=fall.model_copy(update=changed))
