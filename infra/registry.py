"""The registry of targets and drafts, in MLflow: numbered versions, their lineage, and which of them is served.

Who is the champion a row decides (infra/champions.py). Nothing here imports a model library, pickles, or sets MLflow's
process-wide address.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from infra.artifacts import check_manifest, fetched, get, path_of, put
from infra.champions import Champions, Outdated
from infra.database import Database
from infra.settings import Settings, load_settings
from infra.store import NotFound, Store, translated
from infra.versions import (
    OWN_TAGS,
    ForeignVersion,
    Lineage,
    Version,
    as_version,
    cached,
    is_quarantined,
    is_usable,
    model_name,
    written_tags,
)
from models.types import Kind

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


class Registry:
    def __init__(
        self,
        uri: str,
        artifact_root: Path,
        database: Database,
        object_store: str = "",
        cache_gib: float = math.inf,
        model_prefix: str = "",
    ) -> None:
        """Take MLflow's store, the query log's database, where versions lie and how large their cache may be, and the
        prefix of its models' names."""
        self.store, self._cache_gib = Store(uri, artifact_root, object_store), cache_gib
        self._prefix = model_prefix
        self._champions = Champions(database, self.store, self.model, self._refusal)

    def alone(self) -> AbstractContextManager[None]:
        """Keep everybody else with this database from promoting and quarantining; see `Champions.alone`."""
        return self._champions.alone()

    def model(self, kind: Kind) -> str:
        """Return the name of the model in MLflow whose versions those of a kind are."""
        return model_name(self._prefix, kind)

    def register(
        self,
        kind: Kind,
        directory: Path,
        tags: Mapping[str, str],
        metrics: Mapping[str, float] | None = None,
        files: Sequence[Path] = (),
        description: str = "",
        in_place: bool = False,
    ) -> Version:
        """Store a checked directory as the next version of its kind; it is not served yet.

        Its files go into the object store, if there is one. Else MLflow keeps a copy, unless they stay `in_place`: then
        the version is where the directory is. An MLflow server takes no such address of its clients, and gets a copy.

        A draft's tags are those of its lineage. `files` are reports, kept in the version's run before the version is
        listed, which `attached` reads. MLflow shows `description` first, with links to the files.

        Raises:
            ValueError: the manifest does not fit, a tag of a draft is missing or wrong, a tag is one of OWN_TAGS, or a
                metric is not finite.
            StoreUnavailable: the store failed; a version that was not finished is never listed.
        """
        if kind == "draft":
            Lineage.from_tags(tags)
        if reserved := [name for name in OWN_TAGS if name in tags]:
            raise ValueError(f"the registry sets the tags {', '.join(reserved)} itself")
        sha256 = check_manifest(directory, remembered=kind == "target")
        source = put(directory, kind, self.store.object_store) if self.store.object_store else ""
        if in_place and not source and not self.store.uri.startswith("http"):
            source = directory.resolve().as_uri()
        run_id = self.store.record_run(f"register {kind}", {}, metrics or {}, files)
        folder = f"#/experiments/{self.store.experiment_id}/runs/{run_id}/artifactPath"  # as MLflow's page calls it
        places = ", ".join(f"[{file.name}]({folder}/{file.name})" for file in files)
        with translated(f"registering {directory} as {kind}"):
            model = None if source else self.store.log_model(kind, directory, run_id)
            self.store.require_model(self.model(kind))
            version = self.store.client.create_model_version(
                self.model(kind),
                source=source if model is None else model.artifact_location,
                run_id=run_id,
                tags={
                    **written_tags(kind, tags),
                    "sha256": sha256,
                    **({} if model is None else {"model_id": model.model_id}),
                },
                description=f"{description}\n\n{places}".strip(),
                # A database store looks the id up at MLflow's process-wide address; a server, at its own.
                model_id=model.model_id if model is not None and self.store.uri.startswith("http") else None,
            )
            if model is not None:
                self.store.client.set_logged_model_tags(
                    model.model_id, {"version": f"{version.name}/{version.version}"}
                )
        return as_version(version)

    def champion(self, kind: Kind) -> Version | None:
        """Return the version that is to be served, None before the first; ForeignVersion if it was damaged by hand."""
        version = self._champions.version(kind)
        return None if version is None else as_version(version)

    def get(self, kind: Kind, number: int) -> Version:
        """Return one version; NotFound if there is no such number."""
        return as_version(self.store.version(self.model(kind), number))

    def versions(self, kind: Kind) -> list[Version]:
        """Return all versions of a kind, newest first, without foreign ones."""
        found: list[Version] = []
        token = None
        with translated(f"listing versions of {kind}"):
            while True:
                page = self.store.client.search_model_versions(f"name = '{self.model(kind)}'", page_token=token)
                for version in page:
                    with suppress(ForeignVersion):
                        found.append(as_version(version))
                if not (token := page.token):
                    return sorted(found, key=lambda version: version.number, reverse=True)

    def attached(self, version: Version, name: str) -> str | None:
        """Return a text file that was registered with a version, None if there is none of that name (any more)."""
        try:
            with translated(f"reading {name} of {version.kind} {version.number}"):
                run_id = self.store.client.get_model_version(self.model(version.kind), str(version.number)).run_id
                assert run_id is not None  # `register` makes every version of a run
                return self.store.read_text(run_id, name)
        except NotFound:  # somebody deleted the run
            return None

    def promote(self, kind: Kind, number: int, forced: str = "", expected_champion: int | None = None) -> None:
        """Make a version the champion and remember the former one in its tag `previous`.

        `forced`, why it is promoted against its gate, is kept as a tag. The `expected_champion`, which it was found
        better than, must still be the champion, and good; None replaces any.

        Raises:
            ValueError: there is no such version, or it is quarantined.
            Outdated: another version than `expected_champion` is the champion, or that one was quarantined.
        """
        with self.alone():
            _require_usable(self.get(kind, number))
            row = self._champions.settle(kind)
            if row.version == number:
                return
            if expected_champion is not None:
                self.require_champion(kind, expected_champion)
            if forced:
                with translated(f"promoting {kind} {number}"):
                    self.store.client.set_model_version_tag(self.model(kind), str(number), "forced", forced)
            self._champions.move(kind, row, number, row.version)

    def require_promotable(self, version: Version) -> None:
        """Raise ValueError unless a version may be served: a draft, only with the target that is the champion."""
        _require_usable(version)
        if version.kind == "draft":
            target = self.champion("target")
            if target is None or version.target.sha256 != target.target.sha256:
                served = "there is none" if target is None else f"that is {target.number}"
                made_for = f"was made for target {version.lineage.target_version}, not for the champion: {served}"
                raise ValueError(f"draft {version.number} {made_for}")

    def require_champion(self, kind: Kind, number: int) -> None:
        """Raise Outdated unless a version that something was gated against is the champion still, and good."""
        champion: Version | None = None
        with suppress(ForeignVersion):
            champion = self.champion(kind)
        gated = f"it was gated against {kind} {number}"
        if champion is None or champion.number != number:
            now = "there is none" if champion is None else f"that is {champion.number}"
            raise Outdated(f"{gated}, which is no longer the champion: {now}")
        if is_quarantined(champion):
            raise Outdated(f"{gated}, which is quarantined: {champion.quarantined}")

    def revert(self, kind: Kind, number: int, reason: str) -> Version | None:
        """Quarantine a version, go back to the last good one before it if it serves, and return the champion then."""
        with self.alone():
            row = self._champions.settle(kind)
            self.quarantine(kind, number, reason)
            if row.version != number:
                return self.champion(kind)
            target = self.previous_good(self.get(kind, number))
            self._champions.move(kind, row, *((None, None) if target is None else (target.number, target.previous)))
            return target

    def roll_back(self, kind: Kind, quarantine: str = "") -> Version:
        """Make the last good champion before this one the champion again, and return it; NotFound without one.

        With a reason for its quarantine, the version left may never be promoted again.
        """
        with self.alone():
            row, champion = self._champions.settle(kind), self.champion(kind)
            previous = None if champion is None else self.previous_good(champion)
            if champion is None or previous is None:
                was = "there is no champion" if champion is None else f"{kind} {champion.number} has none before it"
                raise NotFound(f"there is no good {kind} to go back to: {was}")
            if quarantine:  # first, so that whoever sees another champion can tell why
                self.quarantine(kind, champion.number, quarantine)
            self._champions.move(kind, row, previous.number, previous.previous)
            return previous

    def tag(self, version: Version, name: str, value: str) -> None:
        """Set a tag of a version beside its own; ValueError if the tag is one of OWN_TAGS."""
        if name in OWN_TAGS:
            raise ValueError(f"the registry sets the tag {name} itself")
        with translated(f"tagging {version.kind} {version.number}"):
            self.store.client.set_model_version_tag(self.model(version.kind), str(version.number), name, value)

    def quarantine(self, kind: Kind, number: int, reason: str) -> None:
        """Mark a version as never to be served; the first reason stays; ValueError without version or reason."""
        if not reason:
            raise ValueError("a quarantine needs a reason, got an empty one")
        with self.alone():
            if not is_quarantined(self.get(kind, number)):
                with translated(f"quarantining {kind} {number}"):
                    self.store.client.set_model_version_tag(self.model(kind), str(number), "quarantined", reason)

    def download(self, version: Version, cache: Path, owner: str = "") -> Path:
        """Return a local directory with the version's files, checked against its digest.

        It is the version's own where that lies in place, else a copy in the cache, which `owner` holds from now on: a
        good one is returned without asking any store, a bad one is fetched again (`infra.artifacts.fetched`). A draft's
        bytes are read each time, those of a target only if its files changed.

        Raises:
            ValueError: the files are not those that were registered.
            StoreUnavailable: they are not in the cache, and can't be fetched.
        """
        if version.address.startswith("file:"):
            _require_digest(directory := path_of(version.address), version)
            return directory

        def fetch(staging: Path) -> None:
            if version.address:
                get(version.address, version.sha256, staging)
            else:
                with translated(f"fetching {version.kind} {version.number}"):
                    self.store.fetch_model(self.model(version.kind), version.number, staging)
                _require_digest(staging, version)

        final = cached(version, cache)
        return fetched(final, fetch, lambda directory: _require_digest(directory, version), self._cache_gib, owner)

    def previous_good(self, version: Version) -> Version | None:
        """Return the last good champion before a version, None if there was none."""
        seen = {version.number}  # going back and forth between two can make it a circle
        while (previous := version.previous) is not None and previous not in seen:
            try:
                version = self.get(version.kind, previous)
            except ForeignVersion:
                return None
            if is_usable(version):
                return version
            seen.add(version.number)
        return None

    def _refusal(self, version: "ModelVersion") -> str:
        """Return why a version that people moved the alias to can't be served, "" if it can."""
        try:
            self.require_promotable(as_version(version))
        except ValueError as error:
            return str(error)
        return ""


def open_registry(settings: Settings | None = None) -> Registry:
    settings = settings or load_settings()
    places = settings.mlflow_uri, settings.mlflow_files, Database(settings.querylog), settings.object_store
    return Registry(*places, settings.cache_gib, settings.model_prefix)


def _require_usable(version: Version) -> None:
    if is_quarantined(version):
        raise ValueError(f"{version.kind} {version.number} is quarantined: {version.quarantined}")
    if version.cleaned:
        raise ValueError(f"the files of {version.kind} {version.number} were cleaned away on {version.cleaned}")


def _require_digest(directory: Path, version: Version) -> None:
    if (sha256 := check_manifest(directory, remembered=version.kind == "target")) != version.sha256:
        registered = f"{version.kind} {version.number} was registered with {version.sha256}"
        raise ValueError(f"{directory} has digest {sha256}, {registered}")
