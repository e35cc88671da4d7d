"""What a replica knows of its drafts: plain values, which services/transitions.py makes new ones of.

A version is known by its label, number and digest, because a number could come again in a new registry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from infra.status import Phase, Proof
from infra.versions import Version, is_quarantined
from models.evaluation.canary import Answer
from models.types import Frozen

KEPT_GOOD = 3
MAX_FAILED_STARTS = 3
MAX_WAIT_S = 3600.0

V = TypeVar("V")


class Loaded(NamedTuple):
    """A draft and the local directory that the engine loads it from."""

    version: Version
    directory: Path


class Memory(Frozen):
    """What outlives the process.

    Attributes:
        good: the versions that passed probation last, newest first.
        refused: why a version must not be tried again, by its label.
        unreported: the labels of refusals that the registry was not told of.
        failed_starts: at how many starts in a row the engine failed with a version and then started without it, by its
            label.
    """

    good: tuple[Version, ...] = ()
    refused: dict[str, str] = {}  # noqa: RUF012 - pydantic copies defaults
    unreported: tuple[str, ...] = ()
    failed_starts: dict[str, int] = {}  # noqa: RUF012

    def with_good(self, version: Version) -> "Memory":
        """Put a version first."""
        others = [other for other in self.good if label(other) != label(version)]
        failed_starts = without(self.failed_starts, version)
        return self.model_copy(update={"good": (version, *others)[:KEPT_GOOD], "failed_starts": failed_starts})

    def with_refused(self, version: Version, reason: str) -> "Memory":
        """Note a refusal that the registry is to be told of; the version is no longer good."""
        return self.model_copy(
            update={
                "good": tuple(other for other in self.good if label(other) != label(version)),
                "refused": self.refused | {label(version): reason},
                "unreported": tuple(dict.fromkeys((*self.unreported, label(version)))),
                "failed_starts": without(self.failed_starts, version),
            }
        )

    def with_reported(self, name: str) -> "Memory":
        """Note that the registry knows of a refusal, by the version's label."""
        return self.model_copy(update={"unreported": tuple(other for other in self.unreported if other != name)})

    def without_cleared(self, version: Version) -> "Memory":
        """Forget a refusal that the registry was told of and doesn't hold any more, because somebody cleared it.

        Args:
            version: as the registry has it now.
        """
        if is_quarantined(version) or label(version) in self.unreported:
            return self
        return self.model_copy(update={"refused": without(self.refused, version)})

    def after_start(self, failed: Sequence[Version]) -> "Memory":
        """Count a start of the engine against the drafts that it failed with before it started without them.

        What started in the end shows that the target, the port and the files are fine, but not that the memory was: a
        draft needs some, and may have been unlucky. So it is refused only at the MAX_FAILED_STARTS-th such start in a
        row, and not when another draft failed beside it, which speaks for a common cause.

        Args:
            failed: in one process, the first tried first; the count of any other draft begins anew.
        """
        failed_starts = {label(version): self.failed_starts.get(label(version), 0) + 1 for version in failed}
        memory = self.model_copy(update={"failed_starts": failed_starts})
        if len(failed) != 1 or (num_starts := failed_starts[label(failed[0])]) < MAX_FAILED_STARTS:
            return memory
        return memory.with_refused(failed[0], f"the engine started without it, and not with it, {num_starts} times")

    def postponed(self, patience: "Patience", now_s: float) -> dict[str, "Postponed"]:
        """Return the waits of the drafts that the engine did not start with, by label."""
        return {
            name: Postponed.after(num_starts, "the engine did not start with it", patience, now_s)
            for name, num_starts in self.failed_starts.items()
        }


class Postponed(NamedTuple):
    """A draft that could not be judged.

    Attributes:
        num_attempts: how many failed.
        reason: why the last one did.
        wait_s: how long the next one waits.
        due_s: when that is over, on the monotonic clock.
    """

    num_attempts: int
    reason: str
    wait_s: float
    due_s: float

    @classmethod
    def after(cls, num_attempts: int, reason: str, patience: "Patience", now_s: float) -> "Postponed":
        """Return the wait after so many attempts: as long as a probation may take, doubled by each that failed."""
        wait_s = min(patience.probation_s * 2.0 ** min(num_attempts - 1, 32), MAX_WAIT_S)
        return cls(num_attempts, reason, wait_s, now_s + wait_s)

    def describe(self, now_s: float) -> str:
        """Say it in a line, with the seconds that are left."""
        left_s = self.due_s - now_s
        when = f"comes in {left_s:.0f} s" if left_s > 0 else "is due"
        return f"attempt {self.num_attempts} failed: {self.reason}; the next {when}"


class Patience(NamedTuple):
    """Times that the table asks for.

    Attributes:
        probation_s: how long a probation may take; a postponed draft first waits as long.
        min_swap_interval_s: seconds that a swap is kept from the one before.
        canary_period_s: seconds between two looks at the canary prompts.
        canary_max_in_flight: requests above which such a look waits for another period at most.
    """

    probation_s: float
    min_swap_interval_s: float
    canary_period_s: float
    canary_max_in_flight: int


@dataclass(frozen=True)
class DraftState:
    """Where a replica stands.

    Attributes:
        phase: see the module's docstring.
        boot: what the engine was started with; only its like can be swapped in. None without a draft.
        serving: the draft in the engine that answers may rely on; None without one, or while only speculation off is
            safe.
        proof: what `serving` showed on probation, None before that.
        candidate: the draft that is being tried, None in other phases.
        champion: the number that the registry named last.
        wanted: whether the operator wants speculation.
        fallback: why speculation is off, None while it may be on.
        fault: what the canary prompts showed of a broken draft or engine, None if nothing or if a draft passed since.
        reloaded: label of the draft that was loaded again since, because it and the engine were found broken.
        answers: what `serving` answered on probation, which the canary prompts are held against.
        check_s: when the canary prompts are asked next, on the monotonic clock; None before that is known.
        replacement: why this replica must be replaced, None while it need not.
        memory: good and refused versions, as they are written to the disk.
        unfit: why versions are left alone that are not this target's, or wait for the replica's next start, by label.
        postponed: the drafts that are tried again later, by label: the champion, and the one the replica booted with.
        swapped_s: when the last swap began, on the monotonic clock; None before the first.
        swap_ms: how long the last swap took.
    """

    phase: Phase
    boot: Loaded | None
    serving: Loaded | None
    memory: Memory
    fallback: str | None
    proof: Proof | None = None
    candidate: Loaded | None = None
    champion: int | None = None
    wanted: bool = True
    fault: str | None = None
    reloaded: str | None = None
    answers: tuple[Answer, ...] = ()
    check_s: float | None = None
    replacement: str | None = None
    unfit: dict[str, str] = field(default_factory=dict)
    postponed: Mapping[str, Postponed] = field(default_factory=dict)
    swapped_s: float | None = None
    swap_ms: float | None = None

    @classmethod
    def started(cls, boot: Loaded | None, memory: Memory) -> "DraftState":
        """Return the state of a replica that has just started."""
        return cls(
            phase=Phase.EMPTY if boot is None else Phase.UNPROVEN,
            boot=boot,
            serving=boot,
            memory=memory,
            fallback="no draft" if boot is None else None,
        )

    @property
    def refused(self) -> dict[str, str]:
        """Why versions are not served, by label."""
        return self.memory.refused | self.unfit

    @property
    def unreported(self) -> dict[str, str]:
        """Why versions were refused that the registry was not told of, by label."""
        return {name: self.memory.refused[name] for name in self.memory.unreported}

    @property
    def speculates(self) -> bool:
        """Whether the engine is to speculate."""
        return self.wanted and self.fallback is None and self.phase is not Phase.REVERTING

    def is_due(self, version: Version, now_s: float) -> bool:
        """Whether a version need not wait."""
        postponed = self.postponed.get(label(version))
        return postponed is None or now_s >= postponed.due_s

    def fallbacks(self) -> tuple[Loaded | Version, ...]:
        """Return what may be put back, the best first; a version must be fetched before."""
        passed_over = {*self.postponed} | ({label(self.serving.version)} if self.serving else set())
        others = (good for good in self.memory.good if label(good) not in passed_over)
        return (*others,) if self.serving is None else (self.serving, *others)


def label(version: Version) -> str:
    """Return number and digest; the number alone could come again in a new registry."""
    return f"{version.number}-{version.sha256[:12]}"


def without(by_label: Mapping[str, V], version: Version) -> dict[str, V]:
    """Return what is known by label, but for one version."""
    return {name: one for name, one in by_label.items() if name != label(version)}
