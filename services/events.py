"""What happens to a replica's drafts, and what the loop does about it, as values.

services/reconciler.py sees events and executes actions; services/transitions.py says which actions follow from which.
"""

from dataclasses import dataclass

from infra.registry import Version
from infra.status import Proof
from services.states import Loaded

# Events: what the loop saw. Times are on the monotonic clock.


@dataclass(frozen=True)
class Ticked:
    """It is time for a look."""

    now_s: float


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
    """A champion is sound, and only an engine that was started with it can serve it."""

    reason: str


@dataclass(frozen=True)
class Swapped:
    """The engine took the candidate."""

    swap_ms: float


@dataclass(frozen=True)
class Passed:
    """The draft on probation showed what it had to."""

    proof: Proof


@dataclass(frozen=True)
class Failed:
    """A draft has a fault of its own, in its files or on probation."""

    version: Version
    reason: str


@dataclass(frozen=True)
class Undecided:
    """The draft on probation could not be judged."""

    reason: str
    now_s: float


@dataclass(frozen=True)
class Restored:
    """A good draft was put back."""

    draft: Loaded


@dataclass(frozen=True)
class Exhausted:
    """No good draft could be put back."""


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
    Ticked | Switched | Named | Fetched | MadeForAnother | NeedsReplica | Swapped
    | Passed | Failed | Undecided | Restored | Exhausted | Quarantined | Reported
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
class Report:
    """Tell the registry of the refusals that it doesn't know; brings `Reported` for each."""


@dataclass(frozen=True)
class Ask:
    """Ask the registry for its champion; brings `Named`."""


@dataclass(frozen=True)
class Fetch:
    """Get a champion's files and check them; brings `Fetched`, `MadeForAnother`, `NeedsReplica` or `Failed`."""

    version: Version


@dataclass(frozen=True)
class Inspect:
    """Ask the registry about the served version; brings `Quarantined` if it is."""

    version: Version


@dataclass(frozen=True)
class Prove:
    """Put the served draft on probation; brings `Passed`, `Failed` or `Undecided`."""

    draft: Loaded


@dataclass(frozen=True)
class Try:
    """Swap a draft in and put it on probation; brings `Swapped`, and then or instead what `Prove` brings."""

    draft: Loaded


@dataclass(frozen=True)
class PutBack:
    """Load the first of `DraftState.fallbacks` that can be; brings `Restored` or `Exhausted`."""


@dataclass(frozen=True)
class SetSpeculation:
    """Switch the engine's speculation."""

    on: bool


@dataclass(frozen=True)
class Remember:
    """Write the memory to the disk."""


Action = Count | Say | Report | Ask | Fetch | Inspect | Prove | Try | PutBack | SetSpeculation | Remember
