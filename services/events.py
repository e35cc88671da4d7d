"""What happens to a replica's drafts, and what the loop does about it, as values.

services/reconciler.py sees events and executes actions; services/transitions.py says which actions follow from which.
"""

from dataclasses import dataclass
from typing import NamedTuple

from infra.status import Proof
from infra.versions import Version
from models.evaluation.canary import Answer, Finding
from services.states import DraftState, Loaded

# Events: what the loop saw. Times are on the monotonic clock.


@dataclass(frozen=True)
class Ticked:
    """It is time for a look, while so many requests are being answered."""

    now_s: float
    in_flight: int = 0


@dataclass(frozen=True)
class Switched:
    """An operator wants speculation on or off."""

    on: bool


@dataclass(frozen=True)
class Named:
    """The registry named its champion, or that there is none."""

    champion: Version | None
    now_s: float


@dataclass(frozen=True)
class Fetched:
    """A champion's files are here, good, and can be swapped in."""

    draft: Loaded
    now_s: float


@dataclass(frozen=True)
class MadeForAnother:
    """A champion is another target's, so another service may want it."""

    version: Version
    reason: str


@dataclass(frozen=True)
class NeedsReplica:
    """A champion is sound, and only an engine that was started with it can serve it.

    Attributes:
        goes_back: whether it is champion because a newer one, which this replica has or can't start with, was
            quarantined.
    """

    version: Version
    reason: str
    goes_back: bool = False


@dataclass(frozen=True)
class NoRoom:
    """A champion is sound, and there is too little memory to load it beside the draft that serves."""

    version: Version
    reason: str
    now_s: float


@dataclass(frozen=True)
class Swapped:
    """The engine took the candidate."""

    swap_ms: float


@dataclass(frozen=True)
class Passed:
    """The draft on probation showed what it had to, in these answers."""

    proof: Proof
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class Failed:
    """A draft has a fault of its own, in its files or on probation."""

    version: Version
    reason: str
    now_s: float


@dataclass(frozen=True)
class Undecided:
    """The draft on probation could not be judged."""

    reason: str
    now_s: float


@dataclass(frozen=True)
class CalledOff:
    """A probation or a canary was ended, because an operator wants speculation off."""


@dataclass(frozen=True)
class Checked:
    """The canary prompts were answered by the draft that serves."""

    finding: Finding
    text: str
    now_s: float


@dataclass(frozen=True)
class Restored:
    """A good draft was put back."""

    draft: Loaded


@dataclass(frozen=True)
class Exhausted:
    """No good draft could be put back."""


@dataclass(frozen=True)
class Late:
    """The last good draft was not put back in time."""


@dataclass(frozen=True)
class Quarantined:
    """Somebody found the served draft bad; `version` is what the registry holds under its number now."""

    version: Version
    reason: str


@dataclass(frozen=True)
class Reported:
    """The registry knows of a refusal."""

    name: str


Event = (
    Ticked | Switched | Named | Fetched | MadeForAnother | NeedsReplica | NoRoom | Swapped | Passed | Failed
    | Undecided | CalledOff | Checked | Restored | Exhausted | Late | Quarantined | Reported
)  # fmt: skip


# Actions: what the loop does next, in their order. What an action brings about comes before the action after it.


@dataclass(frozen=True)
class Count:
    """Count what happened, and say it in the log if there is something to say."""

    name: str
    text: str = ""


@dataclass(frozen=True)
class Say:
    """Tell the log of good news."""

    text: str


@dataclass(frozen=True)
class Tell:
    """Tell the orchestrator, by event."""

    event: str
    text: str


@dataclass(frozen=True)
class Report:
    """Tell the registry of the refusals that it doesn't know; brings `Reported` for each."""


@dataclass(frozen=True)
class Ask:
    """Ask the registry for its champion; brings `Named`."""


@dataclass(frozen=True)
class Fetch:
    """Get a champion's files and check them.

    Brings `Fetched`, `MadeForAnother`, `NeedsReplica`, `NoRoom` or `Failed`.
    """

    version: Version


@dataclass(frozen=True)
class Inspect:
    """Ask the registry about the served version; brings `Quarantined` if it is."""

    version: Version


@dataclass(frozen=True)
class Prove:
    """Put the served draft on probation; brings `Passed`, `Failed`, `Undecided` or `CalledOff`."""

    draft: Loaded


@dataclass(frozen=True)
class Try:
    """Swap a draft in and put it on probation; brings `Swapped`, and then or instead what `Prove` brings."""

    draft: Loaded


@dataclass(frozen=True)
class Check:
    """Ask the served draft the canary prompts; brings `Checked`, `Undecided` or `CalledOff`."""

    draft: Loaded


@dataclass(frozen=True)
class CallOff:
    """End the probation or the canary that is on its way, if there is one; brings `CalledOff`."""


@dataclass(frozen=True)
class PutBack:
    """Load the first of `DraftState.fallbacks` that can be; brings `Restored`, `Exhausted` or `Late`."""


@dataclass(frozen=True)
class SetSpeculation:
    """Switch the engine's speculation."""

    on: bool


@dataclass(frozen=True)
class Remember:
    """Write the memory to the disk."""


Action = (
    Count | Say | Tell | Report | Ask | Fetch | Inspect | Prove | Try | Check | CallOff | PutBack | SetSpeculation
    | Remember
)  # fmt: skip


class Step(NamedTuple):
    """What follows from an event: the next state, and what is to be done."""

    state: DraftState
    actions: tuple[Action, ...] = ()
