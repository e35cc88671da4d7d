"""Which drafts a replica may load, and what it remembers of them over a restart.

Two kinds of refusal: a draft that is bad (wrong bytes, tensors or output) is quarantined for everyone; one that was
made for another target is only left alone here, since another service may want it.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from infra.registry import ForeignVersion, Registry, Version, is_quarantined
from infra.store import StoreUnavailable
from models.params import Frozen
from models.targets import TargetCard

KEPT_GOOD = 3
# (directory, a directory of the wanted shape or None, target); ValueError says what is wrong.
Check = Callable[[Path, Path | None, TargetCard], None]

log = logging.getLogger(__name__)


class Unfit(ValueError):
    """The draft was made for another target."""


class Loaded(NamedTuple):
    """A draft in the engine and the directory it came from."""

    version: Version
    directory: Path


class State(Frozen):
    """What outlives the process.

    Attributes:
        good: the versions that passed probation last, newest first.
        refused: why a version must not be tried again, by its label.
    """

    good: tuple[Version, ...] = ()
    refused: dict[str, str] = {}  # noqa: RUF012 - pydantic copies defaults

    def with_good(self, version: Version) -> "State":
        """Put a version first."""
        others = [other for other in self.good if label(other) != label(version)]
        return State(good=(version, *others)[:KEPT_GOOD], refused=self.refused)

    def with_refused(self, version: Version, reason: str) -> "State":
        """Note a refusal; the version is no longer good."""
        good = tuple(other for other in self.good if label(other) != label(version))
        return State(good=good, refused=self.refused | {label(version): reason})


def label(version: Version) -> str:
    """Return number and digest; the number alone could come again in a new registry."""
    return f"{version.number}-{version.sha256[:12]}"


def read_state(path: Path) -> State:
    """Read the state; empty if there is none yet, ValueError if it is damaged."""
    try:
        return State.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return State()
    except ValidationError as error:
        raise ValueError(f"{path} is not a state of drafts: {error.error_count()} faults") from error


def write_state(path: Path, state: State) -> None:
    """Write the state in one rename, flushed to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            json.dump(state.model_dump(mode="json"), file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class DraftSource:
    """Fetches versions and checks everything that can be said of them before loading."""

    def __init__(self, registry: Registry, cache: Path, target: TargetCard, check: Check) -> None:
        self.registry = registry
        self._cache, self._target, self._check = cache, target, check

    def champion(self) -> Version | None:
        """Return the draft that the registry wants served.

        Raises:
            StoreUnavailable: the registry can't be asked.
            ForeignVersion: somebody pointed it at something else.
        """
        return self.registry.champion("draft")

    def fetch(self, version: Version) -> Path:
        """Return a local directory of the version, checked against its digest and the served target.

        Raises:
            Unfit: it was made for another target.
            ValueError: it is quarantined, or its files are bad.
            OSError: the store or the disk failed; the same call may succeed later.
        """
        if is_quarantined(version):
            raise ValueError(f"quarantined: {version.tags['quarantined']}")
        served = self._target
        for tag, wanted in (
            ("target_sha256", served.sha256),
            ("tokenizer_sha256", served.tokenizer_sha256),
            ("vocab_size", str(served.vocab_size)),
        ):
            if (found := version.tags.get(tag, "")) != wanted:
                raise Unfit(f"tag {tag} is {found[:16]!r}, the served target has {wanted[:16]!r}")
        directory = self.registry.download(version, self._cache)
        self._check(directory, None, served)
        return directory

    def require_shape(self, directory: Path, like: Path) -> None:
        """Raise ValueError if the draft can't be swapped in for the one that the engine was started with."""
        self._check(directory, like, self._target)


def choose_boot_draft(source: DraftSource, state: State, counts: Counter[str]) -> tuple[Loaded | None, State]:
    """Pick what a starting replica loads: the champion, or the last good version that is in the cache.

    Args:
        source: registry and cache.
        state: what the replica before this one knew.
        counts: gets `registry_unavailable`, `refused`, `unfit` and `errors`.

    Returns:
        The draft, None if there is no usable one, and the state with what was refused.
    """
    candidates: list[Version] = list(state.good)
    try:
        champion = source.champion()
        candidates = [version for version in (champion, *state.good) if version is not None]
    except StoreUnavailable as error:
        counts["registry_unavailable"] += 1
        log.warning("starting without the registry: %s", error)
    except ForeignVersion as error:  # what somebody wrote into the registry must not keep a replica from starting
        counts["errors"] += 1
        log.warning("starting without the champion: %s", error)
    for version in candidates:
        if label(version) in state.refused:
            continue
        try:
            return Loaded(version, source.fetch(version)), state
        except Unfit as error:
            counts["unfit"] += 1
            log.warning("draft %s does not fit: %s", version.number, error)
        except ValueError as error:
            counts["refused"] += 1
            log.warning("draft %s is refused: %s", version.number, error)
            state = state.with_refused(version, str(error))
        except OSError as error:
            counts["errors"] += 1
            log.warning("draft %s can't be fetched: %s", version.number, error)
    return None, state
