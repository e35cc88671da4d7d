"""What a replica knows of its drafts, what it remembers over a restart, and which drafts it may load.

What is known are plain values, which services/swap.py makes new ones of. A version is known by its label, number and
digest, because a number could come again in a new registry.

Three kinds of refusal: a draft that is bad (wrong bytes, tensors or output) is quarantined for everyone; one that was
made for another target, or whose family this release can't tell, is only left alone here, since another service may
want it; one of another family, K or shape than the running engine's is as good as any, and waits for a replica of its
own.
"""

import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from infra.files import write_atomic
from infra.memory import free_memory_gib
from infra.registry import Registry
from infra.status import Phase, Proof
from infra.store import StoreUnavailable
from infra.versions import ForeignVersion, Version, is_quarantined
from models.core.drafting.draft_families import UnknownFamily, check_draft
from models.core.evaluation.canary import Answer
from models.targets import TargetCard
from models.types import Frozen

KEPT_GOOD = 3
MAX_FAILED_STARTS = 3
MAX_WAIT_S = 3600.0
# A draft's file is read whole, and its tensors are made anew beside those that serve.
COPIES_OF_A_SWAP = 2
WEIGHTS = "*.safetensors"

V = TypeVar("V")

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A draft and the local directory that the engine loads it from."""

    version: Version
    directory: Path


class DraftHistory(Frozen):
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

    def with_good(self, version: Version) -> "DraftHistory":
        """Put a version first."""
        others = [other for other in self.good if label(other) != label(version)]
        failed_starts = without(self.failed_starts, version)
        return self.model_copy(update={"good": (version, *others)[:KEPT_GOOD], "failed_starts": failed_starts})

    def with_refused(self, version: Version, reason: str) -> "DraftHistory":
        """Note a refusal that the registry is to be told of; the version is no longer good."""
        return self.model_copy(
            update={
                "good": tuple(other for other in self.good if label(other) != label(version)),
                "refused": self.refused | {label(version): reason},
                "unreported": tuple(dict.fromkeys((*self.unreported, label(version)))),
                "failed_starts": without(self.failed_starts, version),
            }
        )

    def with_reported(self, name: str) -> "DraftHistory":
        """Note that the registry knows of a refusal, by the version's label."""
        return self.model_copy(update={"unreported": tuple(other for other in self.unreported if other != name)})

    def without_cleared(self, version: Version) -> "DraftHistory":
        """Forget a refusal that the registry was told of and doesn't hold any more, because somebody cleared it."""
        if is_quarantined(version) or label(version) in self.unreported:
            return self
        return self.model_copy(update={"refused": without(self.refused, version)})

    def after_start(self, failed: Sequence[Version]) -> "DraftHistory":
        """Count a start of the engine against the drafts that it failed with before it started without them.

        What started in the end shows that the target, the port and the files are fine, but not that the memory was: a
        draft needs some, and may have been unlucky. So it is refused only at the MAX_FAILED_STARTS-th such start in a
        row, and not when another draft failed beside it, which speaks for a common cause. The count of any other draft
        begins anew.
        """
        failed_starts = {label(version): self.failed_starts.get(label(version), 0) + 1 for version in failed}
        memory = self.model_copy(update={"failed_starts": failed_starts})
        if len(failed) != 1 or (num_starts := failed_starts[label(failed[0])]) < MAX_FAILED_STARTS:
            return memory
        return memory.with_refused(failed[0], f"the engine started without it, and not with it, {num_starts} times")

    def postponed(self, policy: "ReconcilerPolicy", now_s: float) -> dict[str, "Postponed"]:
        """Return the waits of the drafts that the engine did not start with, by label."""
        return {
            name: Postponed.after(num_starts, "the engine did not start with it", policy, now_s)
            for name, num_starts in self.failed_starts.items()
        }


class Postponed(NamedTuple):
    """A draft that could not be tested.

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
    def after(cls, num_attempts: int, reason: str, policy: "ReconcilerPolicy", now_s: float) -> "Postponed":
        """Return the wait after so many attempts: as long as a probation may take, doubled by each that failed."""
        wait_s = min(policy.probation_s * 2.0 ** min(num_attempts - 1, 32), MAX_WAIT_S)
        return cls(num_attempts, reason, wait_s, now_s + wait_s)

    def describe(self, now_s: float) -> str:
        """Say it in a line, with the seconds that are left."""
        left_s = self.due_s - now_s
        when = f"comes in {left_s:.0f} s" if left_s > 0 else "is due"
        return f"attempt {self.num_attempts} failed: {self.reason}; the next {when}"


class ReconcilerPolicy(NamedTuple):
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
        phase: see services/swap.py.
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
    memory: DraftHistory
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
    def started(cls, boot: Loaded | None, memory: DraftHistory) -> "DraftState":
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


class Incompatible(ValueError):
    """The draft was made for another target, or this release can't tell its family."""


class NeedsReplacement(ValueError):
    """The draft can't be swapped into this engine; a replica that boots with it serves it."""


class ShortOfMemory(Exception):
    """A second draft does not fit beside the one that serves, now."""


def read_memory(path: Path) -> DraftHistory:
    """Read what the replica before this one knew; empty if there is nothing yet, ValueError if it is damaged."""
    try:
        return DraftHistory.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return DraftHistory()
    except ValidationError as error:
        raise ValueError(f"{path} is not a memory of drafts: {error.error_count()} faults") from error


def write_memory(path: Path, memory: DraftHistory) -> None:
    """Write it in one rename, flushed to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(memory.model_dump(mode="json"), indent=1, sort_keys=True))


def remember(path: Path, memory: DraftHistory, counts: Counter[str]) -> None:
    """Write the memory; a full disk costs the memory of a restart, counted in `errors`, and not the service."""
    try:
        write_memory(path, memory)
    except OSError as error:
        counts["errors"] += 1
        log.warning("the state was not written: %s", error)


class DraftSource:
    """Fetches versions and checks everything that can be said of them before loading."""

    def __init__(self, registry: Registry, cache: Path, target: TargetCard, num_draft_tokens: int) -> None:
        """Remember where drafts come from and what they must fit.

        K is that of drafts that don't say theirs; 0 is an engine that can't speculate.
        """
        self.registry = registry
        self._cache, self._target, self._num_draft_tokens = cache, target, num_draft_tokens

    def champion(self) -> Version | None:
        """Return the draft that the registry wants served.

        Raises:
            StoreUnavailable: the registry can't be asked.
            ForeignVersion: somebody pointed it at something else, or changed a tag by hand.
        """
        champion = self.registry.champion("draft")
        if champion is not None:
            _ = champion.lineage  # which is read here and not where it is loaded
        return champion

    def fetch(self, version: Version) -> Path:
        """Return a local directory of the version, checked against its digest and the served target.

        Raises:
            Incompatible: it was made for another target, or its family can't be told.
            ForeignVersion: its lineage can't be read.
            ValueError: it is quarantined, or its files are bad.
            OSError: the store or the disk failed; the same call may succeed later.
        """
        if is_quarantined(version):
            raise ValueError(f"quarantined: {version.quarantined}")
        served, made_for = self._target, version.lineage.target
        for tag, found, wanted in (
            ("target_sha256", made_for.sha256, served.sha256),
            ("tokenizer_sha256", made_for.tokenizer_sha256, served.tokenizer_sha256),
            ("vocab_size", str(made_for.vocab_size), str(served.vocab_size)),
        ):
            if found != wanted:
                raise Incompatible(f"tag {tag} is {found[:16]!r}, the served target has {wanted[:16]!r}")
        directory = self.registry.download(version, self._cache)
        try:
            check_draft(directory, None, served)
        except UnknownFamily as error:
            raise Incompatible(str(error)) from error
        return directory

    def served_k(self, boot: Version) -> int:
        """Return the K of an engine that boots with a version: its own, if it says one; a configured 0 stays."""
        return self._num_draft_tokens and (boot.lineage.num_draft_tokens or self._num_draft_tokens)

    def require_swappable(self, draft: Loaded, boot: Loaded | None) -> None:
        """Raise NeedsReplacement if a draft can't be swapped in for the one that the engine was started with."""
        name = f"draft {draft.version.number}"
        if boot is None:
            raise NeedsReplacement(
                f"{name} came, and the engine was started without one: it needs a replica of its own"
            )
        served_k, k = self.served_k(boot.version), draft.version.lineage.num_draft_tokens
        if served_k and k is not None and k != served_k:
            raise NeedsReplacement(
                f"{name} drafts {k} tokens a step, this replica {served_k}: needs a replica of its own"
            )
        try:
            check_draft(draft.directory, boot.directory, self._target)
        except ValueError as error:
            raise NeedsReplacement(f"{name} needs a replica of its own: {error}") from error


def require_room(draft: Loaded, min_free_gib: float) -> None:
    """Raise ShortOfMemory if the machine has not the memory to load a draft beside the one that serves."""
    num_bytes = sum(file.stat().st_size for file in draft.directory.glob(WEIGHTS))
    wanted_gib = COPIES_OF_A_SWAP * num_bytes / 2**30 + min_free_gib
    if (free_gib := free_memory_gib()) < wanted_gib:
        raise ShortOfMemory(f"{free_gib:.2f} GiB of memory are free, a swap wants {wanted_gib:.2f}")


def choose_boot_draft(
    source: DraftSource, memory: DraftHistory, counts: Counter[str], failed: Collection[str] = ()
) -> tuple[Loaded | None, DraftHistory]:
    """Pick what a starting replica loads: the champion, or the last good version that is in the cache.

    Those that this start has failed with are passed over, by label. Counts get `registry_unavailable`, `refused`,
    `unfit` and `errors`.

    Returns:
        The draft, None if there is no usable one, and the memory with what was refused and without what was cleared.
    """
    candidates: list[Version] = list(memory.good)
    try:
        champion = source.champion()
        if champion is not None:
            candidates.insert(0, champion)
            memory = memory.without_cleared(champion)
    except StoreUnavailable as error:
        counts["registry_unavailable"] += 1
        log.warning("starting without the registry: %s", error)
    except ForeignVersion as error:  # what somebody wrote into the registry must not keep a replica from starting
        counts["errors"] += 1
        log.warning("starting without the champion: %s", error)
    for version in candidates:
        if label(version) in memory.refused or label(version) in failed:
            continue
        try:
            return Loaded(version, source.fetch(version)), memory
        except Incompatible as error:
            counts["unfit"] += 1
            log.warning("draft %s does not fit: %s", version.number, error)
        except ForeignVersion as error:
            counts["errors"] += 1
            log.warning("draft %s is left alone: %s", version.number, error)
        except ValueError as error:
            counts["refused"] += 1
            log.warning("draft %s is refused: %s", version.number, error)
            memory = memory.with_refused(version, str(error))
        except OSError as error:
            counts["errors"] += 1
            log.warning("draft %s can't be fetched: %s", version.number, error)
    return None, memory
