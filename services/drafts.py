"""What a replica knows of its drafts, what it remembers over a restart, and which drafts it may load and starts with.

What is known are plain values, which services/swap.py makes new ones of. A version is known by its label.

Three kinds of refusal: a draft that is bad (wrong bytes, tensors or output) is quarantined for everyone; one that was
made for another target, or whose family this release can't tell, is only left alone here, since another service may
want it; one of another family, K or shape than the running engine's is as good as any, and waits for a replica of its
own.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from infra.artifacts import release
from infra.files import write_atomic
from infra.priority import free_memory_gib
from infra.registry import Registry
from infra.rollout_store import Member
from infra.rollouts import Seen, Told
from infra.status import Phase, Proof
from infra.store import ObjectsUnavailable, StoreUnavailable
from infra.versions import ForeignVersion, Version, cached, is_quarantined, label
from models.core.drafting.draft_families import UnknownFamily, check_draft
from models.core.evaluation.golden import Answer
from models.serving import Serve
from models.targets import TargetCard
from models.types import Frozen

KEPT_GOOD = 3
MAX_FAILED_STARTS = 3
MAX_WAIT_S = 3600.0
# A draft's file is read whole, and its tensors are made anew beside those that serve.
COPIES_OF_A_SWAP = 2
WEIGHTS = "*.safetensors"

E = TypeVar("E")
V = TypeVar("V")

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A draft and the local directory that the engine loads it from."""

    version: Version
    directory: Path


class DraftHistory(Frozen):
    """What outlives the process; keys are labels of versions.

    Attributes:
        good: those that passed probation last, newest first.
        refused: why one must not be tried again.
        unreported: the refusals that the registry was not told of.
        failed_starts: at how many starts in a row the engine failed with one and then started without it.
    """

    good: tuple[Version, ...] = ()
    refused: dict[str, str] = {}  # noqa: RUF012 - pydantic copies defaults
    unreported: tuple[str, ...] = ()
    failed_starts: dict[str, int] = {}  # noqa: RUF012

    def with_good(self, version: Version) -> "DraftHistory":
        """Note that a version passed probation."""
        good = (version, *self._other_good(version))[:KEPT_GOOD]
        return self.model_copy(update={"good": good, "failed_starts": without(self.failed_starts, version)})

    def with_refused(self, version: Version, reason: str) -> "DraftHistory":
        """Note a refusal that the registry is to be told of; the version is no longer good."""
        return self.model_copy(
            update={
                "good": self._other_good(version),
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

        That may have been for want of memory. So a draft is refused only at the MAX_FAILED_STARTS-th such start in a
        row, and not when another draft failed beside it, which speaks for a common cause.
        """
        failed_starts = {label(version): self.failed_starts.get(label(version), 0) + 1 for version in failed}
        memory = self.model_copy(update={"failed_starts": failed_starts})
        if len(failed) != 1 or (num_starts := failed_starts[label(failed[0])]) < MAX_FAILED_STARTS:
            return memory
        return memory.with_refused(failed[0], f"the engine started without it, and not with it, {num_starts} times")

    def postponed(self, serve: Serve, now_s: float) -> dict[str, "Postponed"]:
        """Return the waits of the drafts that the engine did not start with, by label."""
        return {
            name: Postponed.after(num_starts, "the engine did not start with it", serve, now_s)
            for name, num_starts in self.failed_starts.items()
        }

    def _other_good(self, version: Version) -> tuple[Version, ...]:
        return tuple(other for other in self.good if label(other) != label(version))


class Postponed(NamedTuple):
    """A draft that could not be tested, and waits until `due_s` on the monotonic clock."""

    num_attempts: int
    reason: str
    wait_s: float
    due_s: float

    @classmethod
    def after(cls, num_attempts: int, reason: str, serve: Serve, now_s: float) -> "Postponed":
        """Return the wait after so many attempts: as long as a probation may take, doubled by each after the first."""
        wait_s = min(serve.probation.timeout_s * 2.0 ** min(num_attempts - 1, 32), MAX_WAIT_S)
        return cls(num_attempts, reason, wait_s, now_s + wait_s)

    def describe(self, now_s: float) -> str:
        """Say it in a line, with the seconds that are left."""
        left_s = self.due_s - now_s
        when = f"comes in {left_s:.0f} s" if left_s > 0 else "is due"
        return f"attempt {self.num_attempts} failed: {self.reason}; the next {when}"


@dataclass(frozen=True)
class DraftState:
    """Where a replica stands; times are on the monotonic clock, and keys are labels of versions.

    Attributes:
        boot: what the engine was started with; only its like can be swapped in.
        serving: the draft in the engine that answers may rely on; None also while only speculation off is safe.
        proof: what `serving` showed on probation.
        in_fleet: whether other replicas may try a draft that failed here.
        control: the draft that failed here last, while it is open whether the one before it still passes, "" for none.
        controls: of drafts that failed here, whether the one before them passed once more, right after.
        candidate: the draft that is being tried.
        champion: the number that the registry named last.
        wanted: whether the operator wants speculation.
        fallback: why speculation is off, None while it may be on.
        fault: what the canary prompts showed of a broken draft or engine, None if nothing or if a draft passed since.
        reloaded: label of the draft that was loaded again since, because it and the engine were found broken.
        answers: what `serving` answered on probation, which the canary prompts are held against.
        check_s: when the canary prompts are asked next.
        replacement: why this replica must be replaced, None while it need not.
        unfit: why versions are left alone that are not this target's, or wait for the replica's next start.
        postponed: the drafts that are tried again later: the champion, and the one the replica booted with.
        swapped_s: when the last swap began.
    """

    phase: Phase
    boot: Loaded | None
    serving: Loaded | None
    memory: DraftHistory
    fallback: str | None
    proof: Proof | None = None
    in_fleet: bool = False
    control: str = ""
    controls: Mapping[str, bool] = field(default_factory=dict)
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
        """Why versions are not served."""
        return self.memory.refused | self.unfit

    @property
    def unreported(self) -> dict[str, str]:
        """Why versions were refused that the registry was not told of, but for one whose control is open."""
        return {name: self.memory.refused[name] for name in self.memory.unreported if name != self.control}

    @property
    def speculates(self) -> bool:
        return self.wanted and self.fallback is None and self.phase is not Phase.REVERTING

    def is_due(self, version: Version, now_s: float) -> bool:
        postponed = self.postponed.get(label(version))
        return postponed is None or now_s >= postponed.due_s

    def fallbacks(self) -> tuple[Loaded | Version, ...]:
        """Return what may be put back, the best first; a version must be fetched before."""
        passed_over = {*self.postponed} | ({label(self.serving.version)} if self.serving else set())
        others = (good for good in self.memory.good if label(good) not in passed_over)
        return (*others,) if self.serving is None else (self.serving, *others)


def without(by_label: Mapping[str, V], version: Version) -> dict[str, V]:
    """Return what is known by label, but for one version."""
    return {name: one for name, one in by_label.items() if name != label(version)}


class Incompatible(ValueError):
    """The draft was made for another target, or this release can't tell its family."""


class NeedsReplacement(ValueError):
    """The draft can't be swapped into this engine; a replica that boots with it serves it."""


class ShortOfMemory(Exception):
    """A second draft does not fit beside the one that serves, now."""


def recall(path: Path, counts: Counter[str]) -> DraftHistory:
    """Read what the replica before this one knew, if anything; a damaged file, counted in `errors`, is as none."""
    try:
        return DraftHistory.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return DraftHistory()
    except ValidationError as error:
        counts["errors"] += 1
        log.warning("%s is not a memory of drafts: %d faults; starting without it", path, error.error_count())
        return DraftHistory()


def remember(path: Path, memory: DraftHistory, counts: Counter[str]) -> None:
    """Write the memory; a full disk costs the memory of a restart, counted in `errors`, and not the service."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(memory.model_dump(mode="json"), indent=1, sort_keys=True))
    except OSError as error:
        counts["errors"] += 1
        log.warning("the state was not written: %s", error)


class DraftSource:
    """Fetches versions and checks everything that can be said of them before loading."""

    def __init__(
        self,
        registry: Registry,
        cache: Path,
        target: TargetCard,
        num_draft_tokens: int,
        member: Member | None = None,
    ) -> None:
        """K is that of drafts that don't say theirs, or 0; a `member` of a fleet loads what its rollout lets it."""
        self.registry, self.member = registry, member
        self._cache, self._target, self._num_draft_tokens = cache, target, num_draft_tokens
        self._owner = f"drafts {id(self)}"  # a process may follow the registry for several servers

    def champion(self, state: DraftState | None = None) -> Version | None:
        """Return the draft that this replica is to serve; raises StoreUnavailable, or ForeignVersion.

        `state` is where it stands, None while it starts.
        """
        champion = self.registry.champion("draft")
        if self.member is not None:
            champion = self.member.follow(champion, None if state is None else standing(self.member, state))
        if champion is not None:
            _ = champion.lineage  # which is read here and not where it is loaded
        return champion

    def to_report(self, state: DraftState) -> dict[str, str]:
        """Return the drafts that the registry is to be told of, and why: those refused here, or by the fleet."""
        return state.unreported if self.member is None else self.member.refused(standing(self.member, state))

    def reported(self, name: str) -> None:
        """Note that the registry was told of a draft, by its label."""
        if self.member is not None:
            self.member.store.tell(Told(draft=name))

    def fetch(self, version: Version) -> Path:
        """Return a local directory of the version, checked against its digest and the served target.

        Raises:
            Incompatible: it was made for another target, or its family can't be told.
            ForeignVersion: its lineage can't be read.
            ValueError: it is quarantined, or its files are bad.
            OSError: a store or the disk failed; the same call may succeed later.
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
        directory = self.registry.download(version, self._cache, self._owner)
        try:
            check_draft(directory, None, served)
        except UnknownFamily as error:
            raise Incompatible(str(error)) from error
        return directory

    def let_go(self, but: "DraftState") -> None:
        """Let the cache remove what was fetched, but for the drafts that a state may load again."""
        loaded = {one.directory for one in (but.boot, but.serving, but.candidate) if one is not None}
        release(self._owner, loaded | {cached(version, self._cache) for version in but.memory.good})

    def served_k(self, boot: Version) -> int:
        """Return the K of an engine that boots with a version: its own, if it says one; a configured 0 stays."""
        return self._num_draft_tokens and (boot.lineage.num_draft_tokens or self._num_draft_tokens)

    def require_swappable(self, draft: Loaded, boot: Loaded | None) -> None:
        """Raise NeedsReplacement if a draft can't be swapped in for the one that the engine was started with."""
        name, own = f"draft {draft.version.number}", "needs a replica of its own"
        if boot is None:
            raise NeedsReplacement(f"{name} came, and the engine was started without one: it {own}")
        served_k, k = self.served_k(boot.version), draft.version.lineage.num_draft_tokens
        if served_k and k is not None and k != served_k:
            raise NeedsReplacement(f"{name} drafts {k} tokens a step, this replica {served_k}: {own}")
        try:
            check_draft(draft.directory, boot.directory, self._target)
        except ValueError as error:
            raise NeedsReplacement(f"{name} {own}: {error}") from error


def standing(member: Member, state: DraftState) -> Seen:
    """Return what a replica tells its fleet of where it stands."""
    return Seen(
        name=member.name,
        version="" if state.serving is None else label(state.serving.version),
        proven=state.proof is not None,
        failed=state.unreported,
        controls={name: passed for name, passed in state.controls.items() if name in state.unreported},
        logged_as=member.logged_as,
        counts=member.counts,
    )


def require_room(draft: Loaded, min_free_gib: float) -> None:
    """Raise ShortOfMemory if the machine has not the memory to load a draft beside the one that serves."""
    num_bytes = sum(file.stat().st_size for file in draft.directory.glob(WEIGHTS))
    wanted_gib = COPIES_OF_A_SWAP * num_bytes / 2**30 + min_free_gib
    if (free_gib := free_memory_gib()) < wanted_gib:
        raise ShortOfMemory(f"{free_gib:.2f} GiB of memory are free, a swap wants {wanted_gib:.2f}")


def choose_boot_draft(
    source: DraftSource, memory: DraftHistory, counts: Counter[str], failed: Collection[str] = ()
) -> tuple[Loaded | None, DraftHistory]:
    """Pick what a starting replica loads, if anything: the champion, or the last good version that is in the cache.

    Those that this start has failed with are passed over, by label. The memory comes back with what was refused and
    without what was cleared. Counts get `registry_unavailable`, `artifacts_unavailable`, `refused`, `unfit` and
    `errors`.
    """
    candidates = [*memory.good]
    try:
        if (champion := source.champion()) is not None:
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
            counts["artifacts_unavailable" if isinstance(error, ObjectsUnavailable) else "errors"] += 1
            log.warning("draft %s can't be fetched: %s", version.number, error)
    return None, memory


async def start_engine(
    start: Callable[[Loaded | None], Awaitable[E]], source: DraftSource, state: Path, counts: Counter[str]
) -> tuple[E, Loaded | None, DraftHistory]:
    """Start with the best draft there is, or with the target alone rather than not at all.

    Memory that runs short, a port that is taken and files that are torn end a start too. So a draft that the engine
    does not start with is only passed over, and the next one is tried in the same process. When nothing starts, nothing
    is said of any draft, and what `start` raised for the target alone is raised. `state` is the file of the memory;
    counts get `postponed` and what `choose_boot_draft` counts.
    """
    memory = before = recall(state, counts)
    if source.member is not None:  # what another replica of this home refused may be its own fault
        memory = before = before.model_copy(update={"refused": {}, "unreported": ()})
    failed: dict[str, Version] = {}
    while True:
        boot, memory = await asyncio.to_thread(choose_boot_draft, source, memory, counts, failed)
        try:
            engine = await start(boot)
            break
        except Exception:  # the next rung must be reached whatever this one did
            if boot is None:
                raise
            counts["errors"] += 1
            log.exception("the engine did not start with draft %d", boot.version.number)
            failed[label(boot.version)] = boot.version
    memory = memory.after_start([*failed.values()])
    for name, version in failed.items():
        outcome = "refused" if name in memory.refused else "postponed"
        counts[outcome] += 1
        log.warning("draft %d is %s: the engine started without it", version.number, outcome)
    if memory != before:
        await asyncio.to_thread(remember, state, memory, counts)
    return engine, boot, memory
