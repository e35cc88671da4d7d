"""The registry of targets and drafts, in MLflow: numbered versions, their lineage, and the alias that is served.

Alias `champion` is the truth. It moves last and in one call, after the tag `previous` of the new champion names the
former one, so a crash leaves either champion in place. MLflow can't compare and swap, so whoever moves the alias holds
a lock of the home meanwhile. Nothing here imports a model library, pickles, or sets MLflow's process-wide address.
"""

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from infra.artifacts import check_manifest, renamed_when_complete
from infra.files import lock_file
from infra.settings import Settings, load_settings
from infra.store import NotFound, Store, translated
from infra.versions import (
    FIRST,
    OWN_TAGS,
    ForeignVersion,
    Kind,
    Lineage,
    Version,
    as_version,
    cached,
    is_quarantined,
    is_usable,
    written_tags,
)

CHAMPION = "champion"


class Outdated(ValueError):
    """The champion that a version was gated against is no longer the one to beat."""


class Registry:
    def __init__(self, uri: str, artifact_root: Path) -> None:
        self.store = Store(uri, artifact_root)
        self._threads = threading.RLock()
        self._depth = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else of this home moves an alias or quarantines, and keep them from it in the block.

        Hold it around a decision and the move that follows from it; it may be taken again inside. It is a lock on a
        file beside the artifact root, so it can't cover homes on several machines that share an MLflow server, a file
        system without flock, or whoever moves the alias in MLflow by hand: between these the last one wins.
        """
        root = self.store.artifact_root
        with self._threads, ExitStack() as held:
            if not self._depth:
                root.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock_file(root.with_name(f".{root.name}.lock")))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def register(
        self,
        kind: Kind,
        directory: Path,
        tags: Mapping[str, str],
        metrics: Mapping[str, float] | None = None,
        files: Sequence[Path] = (),
        description: str = "",
    ) -> Version:
        """Store a checked directory as the next version of its kind; it is not served yet.

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
        sha256 = check_manifest(directory)
        run_id = self.store.record_run(f"register {kind}", {}, metrics or {}, files)
        folder = f"#/experiments/{self.store.experiment_id}/runs/{run_id}/artifactPath"  # as MLflow's page calls it
        places = ", ".join(f"[{file.name}]({folder}/{file.name})" for file in files)
        with translated(f"registering {directory} as {kind}"):
            model = self.store.client.create_logged_model(self.store.experiment_id, name=kind, source_run_id=run_id)
            self.store.client.log_model_artifacts(model.model_id, str(directory))
            model = self.store.client.finalize_logged_model(model.model_id, "READY")
            _create_registered_model(self.store, kind)
            version = self.store.client.create_model_version(
                kind,
                source=model.artifact_location,
                run_id=run_id,
                tags={**written_tags(kind, tags), "sha256": sha256, "model_id": model.model_id},
                description=f"{description}\n\n{places}".strip(),
                # A database store looks the id up at MLflow's process-wide address; a server, at its own.
                model_id=model.model_id if self.store.uri.startswith("http") else None,
            )
            self.store.client.set_logged_model_tags(model.model_id, {"version": f"{kind}/{version.version}"})
        return as_version(version)

    def champion(self, kind: Kind) -> Version | None:
        """Return the version that is to be served, None before the first; ForeignVersion if it was made by hand."""
        try:
            with translated(f"looking up the champion of {kind}"):
                return as_version(self.store.client.get_model_version_by_alias(kind, CHAMPION))
        except NotFound:
            return None

    def get(self, kind: Kind, number: int) -> Version:
        """Return one version; NotFound if there is no such number."""
        try:
            with translated(f"looking up {kind} {number}"):
                return as_version(self.store.client.get_model_version(kind, str(number)))
        except NotFound as error:
            raise NotFound(f"the registry has no {kind} {number}") from error

    def versions(self, kind: Kind) -> list[Version]:
        """Return all versions of a kind, newest first, without foreign ones."""
        found: list[Version] = []
        token = None
        with translated(f"listing versions of {kind}"):
            while True:
                page = self.store.client.search_model_versions(f"name = '{kind}'", page_token=token)
                for version in page:
                    with suppress(ForeignVersion):
                        found.append(as_version(version))
                if not (token := page.token):
                    return sorted(found, key=lambda version: version.number, reverse=True)

    def attached(self, version: Version, name: str) -> str | None:
        """Return a text file that was registered with a version, None if there is none of that name (any more)."""
        try:
            with translated(f"reading {name} of {version.kind} {version.number}"):
                run_id = self.store.client.get_model_version(version.kind, str(version.number)).run_id
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
            version = self.get(kind, number)
            if is_quarantined(version):
                raise ValueError(f"{kind} {number} is quarantined: {version.quarantined}")
            if version.cleaned:
                raise ValueError(f"the files of {kind} {number} were cleaned away on {version.cleaned}")
            champion: Version | None = None
            with suppress(ForeignVersion):  # promoting is how the alias is put right
                champion = self.champion(kind)
            if champion is not None and champion.number == number:
                return
            if expected_champion is not None:
                self.require_champion(kind, expected_champion)
            with translated(f"promoting {kind} {number}"):
                if forced:
                    self.store.client.set_model_version_tag(kind, str(number), "forced", forced)
                previous = FIRST if champion is None else str(champion.number)
                self.store.client.set_model_version_tag(kind, str(number), "previous", previous)
                self.store.client.set_registered_model_alias(kind, CHAMPION, str(number))

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
            self.quarantine(kind, number, reason)
            champion = self.champion(kind)
            if champion is None or champion.number != number:
                return champion
            target = self.previous_good(champion)
            with translated(f"reverting {kind} {number}"):
                if target is None:
                    self.store.client.delete_registered_model_alias(kind, CHAMPION)
                else:
                    self.store.client.set_registered_model_alias(kind, CHAMPION, str(target.number))
            return target

    def roll_back(self, kind: Kind, quarantine: str = "") -> Version:
        """Make the last good champion before this one the champion again, and return it; NotFound without one.

        With a reason for its quarantine, the version left may never be promoted again.
        """
        with self.alone():
            champion = self.champion(kind)
            previous = None if champion is None else self.previous_good(champion)
            if champion is None or previous is None:
                was = "there is no champion" if champion is None else f"{kind} {champion.number} has none before it"
                raise NotFound(f"there is no good {kind} to go back to: {was}")
            if quarantine:  # first, so that whoever sees the alias move can tell why
                self.quarantine(kind, champion.number, quarantine)
            with translated(f"rolling {kind} back"):
                self.store.client.set_registered_model_alias(kind, CHAMPION, str(previous.number))
            return previous

    def tag(self, version: Version, name: str, value: str) -> None:
        """Set a tag of a version beside its own; ValueError if the tag is one of OWN_TAGS."""
        if name in OWN_TAGS:
            raise ValueError(f"the registry sets the tag {name} itself")
        with translated(f"tagging {version.kind} {version.number}"):
            self.store.client.set_model_version_tag(version.kind, str(version.number), name, value)

    def quarantine(self, kind: Kind, number: int, reason: str) -> None:
        """Mark a version as never to be served; the first reason stays; ValueError without version or reason."""
        if not reason:
            raise ValueError("a quarantine needs a reason, got an empty one")
        with self.alone():
            if not is_quarantined(self.get(kind, number)):
                with translated(f"quarantining {kind} {number}"):
                    self.store.client.set_model_version_tag(kind, str(number), "quarantined", reason)

    def download(self, version: Version, cache: Path) -> Path:
        """Return a local directory with the version's files, checked against its digest; ValueError if they differ.

        A good copy in the cache is returned without asking the store, a bad one is fetched again. Processes that want
        the same version fetch it once.
        """
        final = cached(version, cache)
        final.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(final.parent / f".{final.name}.lock"):
            if final.exists():
                with suppress(ValueError):
                    _require_digest(final, version)
                    return final
                shutil.rmtree(final)
            with renamed_when_complete(final) as staging:
                (inner := staging / ".fetched").mkdir()
                with translated(f"fetching {version.kind} {version.number}"):
                    from mlflow.artifacts import download_artifacts

                    uri = self.store.client.get_model_version_download_uri(version.kind, str(version.number))
                    # Into a folder of MLflow's choosing below ours; without dst_path it may hand out the store's files.
                    fetched = download_artifacts(artifact_uri=uri, dst_path=str(inner), tracking_uri=self.store.uri)
                for path in Path(fetched).iterdir():
                    path.rename(staging / path.name)
                shutil.rmtree(inner)
                _require_digest(staging, version)
        return final

    def previous_good(self, version: Version) -> Version | None:
        """Return the last good champion before a version, None if there was none."""
        seen = {version.number}  # going back and forth between two can make it a circle
        while (previous := _replaced_by(version)) is not None and previous not in seen:
            version = self.get(version.kind, previous)
            if is_usable(version):
                return version
            seen.add(version.number)
        return None


def open_registry(settings: Settings | None = None) -> Registry:
    settings = settings or load_settings()
    return Registry(settings.mlflow_uri, settings.mlflow_files)


def _create_registered_model(store: Store, kind: Kind) -> None:
    from mlflow.exceptions import MlflowException

    try:
        store.client.create_registered_model(kind)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _replaced_by(version: Version) -> int | None:
    """Return the champion that a version replaced.

    Where somebody moved the alias in MLflow no tag says so: then it is the one that the version was gated against.
    """
    if version.was_champion or version.kind != "draft":
        return version.previous
    with suppress(ForeignVersion):  # whose tags somebody damaged
        return version.lineage.gate_champion
    return None


def _require_digest(directory: Path, version: Version) -> None:
    if (sha256 := check_manifest(directory)) != version.sha256:
        registered = f"{version.kind} {version.number} was registered with {version.sha256}"
        raise ValueError(f"{directory} has digest {sha256}, {registered}")
