"""Which drafts a replica may load, and what it remembers of them over a restart.

Three kinds of refusal: a draft that is bad (wrong bytes, tensors or output) is quarantined for everyone; one that was
made for another target, or whose family this release can't tell, is only left alone here, since another service may
want it; one of another family, K or shape than the running engine's is as good as any, and waits for a replica of its
own.
"""

import json
import logging
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from pydantic import ValidationError

from infra.files import write_atomic
from infra.memory import free_memory_gib
from infra.registry import Registry
from infra.store import StoreUnavailable
from infra.versions import ForeignVersion, Version, is_quarantined
from models.drafting.draft_families import UnknownFamily, check_draft
from models.targets import TargetCard
from services.states import Loaded, Memory, label

# A draft's file is read whole, and its tensors are made anew beside those that serve.
COPIES_OF_A_SWAP = 2
WEIGHTS = "*.safetensors"

log = logging.getLogger(__name__)


class Unfit(ValueError):
    """The draft was made for another target, or this release can't tell its family."""


class OtherReplica(ValueError):
    """The draft can't be swapped into this engine; a replica that boots with it serves it."""


class ShortOfMemory(Exception):
    """A second draft does not fit beside the one that serves, now."""


def read_memory(path: Path) -> Memory:
    """Read what the replica before this one knew; empty if there is nothing yet, ValueError if it is damaged."""
    try:
        return Memory.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Memory()
    except ValidationError as error:
        raise ValueError(f"{path} is not a memory of drafts: {error.error_count()} faults") from error


def write_memory(path: Path, memory: Memory) -> None:
    """Write it in one rename, flushed to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(memory.model_dump(mode="json"), indent=1, sort_keys=True))


def remember(path: Path, memory: Memory, counts: Counter[str]) -> None:
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

        Args:
            registry: of the drafts.
            cache: where downloaded versions lie.
            target: what is served.
            num_draft_tokens: K as configured, for drafts that don't say theirs; 0 for an engine that can't speculate.
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
            champion.require_lineage()
        return champion

    def fetch(self, version: Version) -> Path:
        """Return a local directory of the version, checked against its digest and the served target.

        Raises:
            Unfit: it was made for another target, or its family can't be told.
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
                raise Unfit(f"tag {tag} is {found[:16]!r}, the served target has {wanted[:16]!r}")
        directory = self.registry.download(version, self._cache)
        try:
            check_draft(directory, None, served)
        except UnknownFamily as error:
            raise Unfit(str(error)) from error
        return directory

    def served_k(self, boot: Version) -> int:
        """Return the K of an engine that boots with a version: its own, if it says one; a configured 0 stays."""
        return self._num_draft_tokens and (boot.lineage.num_draft_tokens or self._num_draft_tokens)

    def require_swappable(self, draft: Loaded, boot: Loaded | None) -> None:
        """Raise OtherReplica if a draft can't be swapped in for the one that the engine was started with.

        Args:
            draft: a fetched one.
            boot: what the engine was started with, None if with none.
        """
        name = f"draft {draft.version.number}"
        if boot is None:
            raise OtherReplica(f"{name} came, and the engine was started without one: it needs a replica of its own")
        served_k, k = self.served_k(boot.version), draft.version.lineage.num_draft_tokens
        if served_k and k is not None and k != served_k:
            raise OtherReplica(f"{name} drafts {k} tokens a step, this replica {served_k}: needs a replica of its own")
        try:
            check_draft(draft.directory, boot.directory, self._target)
        except ValueError as error:
            raise OtherReplica(f"{name} needs a replica of its own: {error}") from error


def require_room(draft: Loaded, min_free_gib: float) -> None:
    """Raise ShortOfMemory if the machine has not the memory to load a draft beside the one that serves.

    Args:
        draft: a fetched one.
        min_free_gib: what must be left.
    """
    num_bytes = sum(file.stat().st_size for file in draft.directory.glob(WEIGHTS))
    wanted_gib = COPIES_OF_A_SWAP * num_bytes / 2**30 + min_free_gib
    if (free_gib := free_memory_gib()) < wanted_gib:
        raise ShortOfMemory(f"{free_gib:.2f} GiB of memory are free, a swap wants {wanted_gib:.2f}")


def choose_boot_draft(
    source: DraftSource, memory: Memory, counts: Counter[str], failed: Collection[str] = ()
) -> tuple[Loaded | None, Memory]:
    """Pick what a starting replica loads: the champion, or the last good version that is in the cache.

    Args:
        source: registry and cache.
        memory: what the replica before this one knew.
        counts: gets `registry_unavailable`, `refused`, `unfit` and `errors`.
        failed: labels of the drafts that this start has failed with; they are passed over.

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
        except Unfit as error:
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
