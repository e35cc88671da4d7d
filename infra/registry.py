"""The registry of targets and drafts, in MLflow: numbered versions, their lineage, and the alias that is served.

Alias `champion` is the truth. It moves last and in one call, after the tag `previous` of the new champion names the
former one, so a crash leaves either champion in place. A quarantined version is never promoted and never fallen back
to. MLflow holds plain directories with a manifest; nothing here imports a model library, pickles, or sets MLflow's
process-wide address.
"""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import renamed_when_complete
from infra.manifest import check_manifest
from infra.store import NotFound, Store, translated

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

Kind = Literal["target", "draft"]

CHAMPION = "champion"
LINEAGE_TAGS = (
    "target_name",
    "target_version",
    "target_sha256",
    "tokenizer_sha256",
    "vocab_size",
    "chat_template_sha256",
    "parent",
    "window_first_seq",
    "window_last_seq",
    "window_sha256",
    "sampling",
    "quantization",
    "git_commit",
    "flow_run",
    "gate",
)
OWN_TAGS = ("sha256", "model_id", "previous", "quarantined", "forced")


class ForeignVersion(ValueError):
    """A version that somebody made by hand: nothing is known of it, so it is neither listed nor served."""


class Version(BaseModel):
    """One registered directory; `sha256` is the digest of its manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    number: int = Field(ge=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tags: dict[str, str]
    created_ms: int


class Registry:
    """The versions in one MLflow store, which is reached at first use.

    Attributes:
        store: the connection, and the runs in it.
    """

    def __init__(self, uri: str, artifact_root: Path) -> None:
        """Remember the addresses; see `Store`."""
        self.store = Store(uri, artifact_root)

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

        Args:
            kind: "target" or "draft".
            directory: with a manifest that fits.
            tags: the lineage; a draft must have each of LINEAGE_TAGS, an empty string says "does not apply".
            metrics: finite numbers, shown with the version.
            files: reports, kept in the version's run before the version is listed; `attached` reads them.
            description: what MLflow shows first of the version; where the files lie is added.

        Raises:
            ValueError: the manifest does not fit, a tag is missing or is one of OWN_TAGS, or a metric is not finite.
            StoreUnavailable: the store failed; a version that was not finished is never listed.
        """
        missing = [name for name in LINEAGE_TAGS if kind == "draft" and name not in tags]
        if missing:
            raise ValueError(f"a draft needs the tags {', '.join(missing)}; an empty string says 'does not apply'")
        if reserved := [name for name in OWN_TAGS if name in tags]:
            raise ValueError(f"the registry sets the tags {', '.join(reserved)} itself")
        sha256 = check_manifest(directory)
        run_id = self.store.record_run(f"register {kind}", {}, metrics or {}, files)
        places = ", ".join(f"runs:/{run_id}/{file.name}" for file in files)
        with translated(f"registering {directory} as {kind}"):
            model = self.store.client.create_logged_model(self.store.experiment_id, name=kind, source_run_id=run_id)
            self.store.client.log_model_artifacts(model.model_id, str(directory))
            model = self.store.client.finalize_logged_model(model.model_id, "READY")
            self._create_registered_model(kind)
            version = self.store.client.create_model_version(
                kind,
                source=model.artifact_location,
                run_id=run_id,
                tags={**tags, "sha256": sha256, "model_id": model.model_id},
                description=f"{description}\n\n{places}".strip(),
                # A database store looks the id up at MLflow's process-wide address; a server, at its own.
                model_id=model.model_id if self.store.uri.startswith("http") else None,
            )
            self.store.client.set_logged_model_tags(model.model_id, {"version": f"{kind}/{version.version}"})
        return _version(version)

    def champion(self, kind: Kind) -> Version | None:
        """Return the version that is to be served, None if there is none yet.

        Raises:
            ForeignVersion: the alias was set to a version that was made by hand.
        """
        try:
            with translated(f"looking up the champion of {kind}"):
                return _version(self.store.client.get_model_version_by_alias(kind, CHAMPION))
        except NotFound:
            return None

    def get(self, kind: Kind, number: int) -> Version:
        """Return one version; NotFound, a ValueError, if there is no such number."""
        with translated(f"looking up {kind} {number}"):
            return _version(self.store.client.get_model_version(kind, str(number)))

    def versions(self, kind: Kind) -> list[Version]:
        """Return all versions of a kind, newest first, without foreign ones."""
        found: list[Version] = []
        token = None
        with translated(f"listing versions of {kind}"):
            while True:
                page = self.store.client.search_model_versions(f"name = '{kind}'", page_token=token)
                found += [_version(version) for version in page if "sha256" in version.tags]
                if not (token := page.token):
                    return sorted(found, key=lambda version: version.number, reverse=True)

    def attached(self, version: Version, name: str) -> str | None:
        """Return a text file that was registered with a version, None if there is none of that name (any more)."""
        try:
            with translated(f"reading {name} of {version.kind} {version.number}"):
                run_id = self.store.client.get_model_version(version.kind, str(version.number)).run_id
                if name not in [file.path for file in self.store.client.list_artifacts(run_id)]:
                    return None
                with tempfile.TemporaryDirectory() as folder:
                    return Path(self.store.client.download_artifacts(run_id, name, folder)).read_text(encoding="utf-8")
        except NotFound:  # somebody deleted the run
            return None

    def promote(self, kind: Kind, number: int, forced: str = "") -> None:
        """Make a version the champion and remember the former one in its tag `previous`.

        Promoting the champion changes nothing.

        Args:
            kind: "target" or "draft".
            number: of the version.
            forced: why it is promoted against its gate; kept as a tag.

        Raises:
            ValueError: there is no such version, or it is quarantined.
        """
        version = self.get(kind, number)
        if is_quarantined(version):
            raise ValueError(f"{kind} {number} is quarantined: {version.tags['quarantined']}")
        try:
            champion = self.champion(kind)
        except ForeignVersion:  # promoting is how the alias is put right
            champion = None
        if champion is not None and champion.number == number:
            return
        with translated(f"promoting {kind} {number}"):
            if forced:
                self.store.client.set_model_version_tag(kind, str(number), "forced", forced)
            previous = "" if champion is None else str(champion.number)
            self.store.client.set_model_version_tag(kind, str(number), "previous", previous)
            self.store.client.set_registered_model_alias(kind, CHAMPION, str(number))

    def revert(self, kind: Kind, number: int, reason: str) -> Version | None:
        """Quarantine a version and, if it is the champion, go back to the last good one before it.

        Returns:
            The champion afterwards; None if no good version was left, and the alias is gone.

        Raises:
            ValueError: there is no such version, or the reason is empty.
        """
        self.quarantine(kind, number, reason)
        champion = self.champion(kind)
        if champion is None or champion.number != number:
            return champion
        target = self._last_good(champion)
        with translated(f"reverting {kind} {number}"):
            if target is None:
                self.store.client.delete_registered_model_alias(kind, CHAMPION)
            else:
                self.store.client.set_registered_model_alias(kind, CHAMPION, str(target.number))
        return target

    def roll_back(self, kind: Kind) -> Version:
        """Make the last good champion before this one the champion again; the version left may be promoted again.

        Raises:
            NotFound: there is no champion, or no good one before it.
        """
        champion = self.champion(kind)
        previous = None if champion is None else self._previous_good(champion)
        if previous is None:
            was = "there is no champion" if champion is None else f"{kind} {champion.number} has none before it"
            raise NotFound(f"there is no good {kind} to go back to: {was}")
        with translated(f"rolling {kind} back"):
            self.store.client.set_registered_model_alias(kind, CHAMPION, str(previous.number))
        return previous

    def quarantine(self, kind: Kind, number: int, reason: str) -> None:
        """Mark a version as never to be served; the first reason stays.

        Raises:
            ValueError: there is no such version, or the reason is empty.
        """
        if not reason:
            raise ValueError("a quarantine needs a reason, got an empty one")
        if not is_quarantined(self.get(kind, number)):
            with translated(f"quarantining {kind} {number}"):
                self.store.client.set_model_version_tag(kind, str(number), "quarantined", reason)

    def download(self, version: Version, cache: Path) -> Path:
        """Return a local directory with the version's files, checked against its digest.

        A good copy in the cache is returned without asking the store, a bad one is fetched again. Processes that
        want the same version fetch it once.

        Raises:
            ValueError: what the store holds is not what was registered.
            StoreUnavailable: the store failed and there is no good copy.
        """
        final = cache / version.kind / f"{version.number}-{version.sha256[:12]}"
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / f".{final.name}.lock"):
            if final.exists():
                try:
                    _require_digest(final, version)
                    return final
                except ValueError:
                    shutil.rmtree(final)
            with renamed_when_complete(final) as staging:
                self._fetch(version, staging)
                _require_digest(staging, version)
        return final

    def _fetch(self, version: Version, directory: Path) -> None:
        inner = directory / ".fetched"
        inner.mkdir()
        with translated(f"fetching {version.kind} {version.number}"):
            from mlflow.artifacts import download_artifacts

            uri = self.store.client.get_model_version_download_uri(version.kind, str(version.number))
            # Into a folder of MLflow's choosing below ours; without dst_path it may hand out the store's own files.
            fetched = Path(download_artifacts(artifact_uri=uri, dst_path=str(inner), tracking_uri=self.store.uri))
        for path in fetched.iterdir():
            path.rename(directory / path.name)
        shutil.rmtree(inner)

    def _last_good(self, version: Version) -> Version | None:
        """Return the version itself or, if it is quarantined, the last good one before it."""
        return self._previous_good(version) if is_quarantined(version) else version

    def _previous_good(self, version: Version) -> Version | None:
        """Follow `previous` past quarantined versions; going back and forth between two can make it a circle."""
        seen = {version.number}
        while (previous := version.tags.get("previous", "")) and int(previous) not in seen:
            version = self.get(version.kind, int(previous))
            if not is_quarantined(version):
                return version
            seen.add(version.number)
        return None

    def _create_registered_model(self, kind: Kind) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.store.client.create_registered_model(kind)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


def is_quarantined(version: Version) -> bool:
    """Return whether the version was found bad and must never be served."""
    return "quarantined" in version.tags


def _version(version: "ModelVersion") -> Version:
    if "sha256" not in version.tags:
        raise ForeignVersion(f"{version.name} {version.version} was not registered by redraft: it has no tag sha256")
    return Version(
        kind=version.name,
        number=int(version.version),
        sha256=version.tags["sha256"],
        tags=version.tags,
        created_ms=version.creation_timestamp,
    )


def _require_digest(directory: Path, version: Version) -> None:
    sha256 = check_manifest(directory)
    if sha256 != version.sha256:
        raise ValueError(
            f"{directory} has digest {sha256}, {version.kind} {version.number} was registered with {version.sha256}"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, by kill -9 too
        yield
