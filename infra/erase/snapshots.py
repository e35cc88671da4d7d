"""Snapshots that rows were read into, and the drafts that were trained on them or gated by them.

A snapshot's name is the key of what it was made from, so what is left of one gets a name of its own: under the old name
a later run would take it for the whole. Its digest before stays in the certificate.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from infra.artifacts import check_manifest, path_of, publish, staged
from infra.consent import row_of
from infra.erase.job import Job
from infra.erasures import Rewritten
from infra.files import sweep_staging
from infra.registry import open_registry
from infra.versions import Version
from models.types import MANIFEST_NAME

PARTS = ("train", "held_out", "regression")
# Tag of an address, and that of the digest of its directory; a window's digest is that of its rows.
TAGS = {"window_uri": "", "gate_data": "", "samples_uri": "samples_sha256"}
KIND = "samples"


def rewrite_snapshots(job: Job) -> None:
    """Write each snapshot again without the rows, and point the registry at what is left."""
    for folder in _stages(job.settings.local_artifacts):
        sweep_staging(folder)
    known = {one.snapshot for one in job.certificate.snapshots}
    for directory in _snapshots(job.settings.local_artifacts):
        if directory.as_uri() not in known and (num_rows := _num_held(directory, job.ids)):
            job.keep(snapshots=(*job.certificate.snapshots, _rewritten(job, directory, num_rows)))
    for one in job.certificate.snapshots:
        _point(job, one)
        shutil.rmtree(path_of(one.snapshot), ignore_errors=True)


def name_drafts(job: Job) -> None:
    """Name the drafts that saw the rows, as was recorded when the rows were read, and those trained on from them."""
    if not job.rows:
        return
    of_snapshot = job.log.erasures.reads_of(row.seq for row in job.rows if row.seq is not None)
    named: dict[int, dict[str, int]] = {}
    versions = open_registry(job.settings).versions("draft")[::-1]
    for version in versions:
        lineage, seen = version.lineage, Counter[str]()
        for uri in {lineage.gate_data, lineage.window.uri if lineage.window else ""} - {""}:
            # The name under which its reads were recorded, whatever was taken out of it since.
            seen += of_snapshot.get(Path(uri).name.partition(".")[0], Counter())
        if seen:
            named[version.number] = dict(sorted(seen.items()))
    job.keep(drafts=named, descendants=tuple(_descendants(versions, named)))


def _stages(artifacts: Path) -> list[Path]:
    return sorted(one for one in artifacts.glob("*") if one.is_dir() and one.name not in ("mlflow", "work"))


def _snapshots(artifacts: Path) -> Iterator[Path]:
    for stage in _stages(artifacts):
        for directory in sorted(stage.glob("[!.]*")):
            if (directory / MANIFEST_NAME).is_file() and any((directory / f"{part}.jsonl").is_file() for part in PARTS):
                yield directory.resolve()


def _num_held(directory: Path, ids: frozenset[str]) -> int:
    num_rows = 0
    for part in PARTS:
        with suppress(FileNotFoundError), (directory / f"{part}.jsonl").open(encoding="utf-8") as lines:
            num_rows += sum(_is_of(line, ids) for line in lines)
    return num_rows


def _is_of(line: str, ids: frozenset[str]) -> bool:
    """Return whether a line is of one of the rows, or of one of their prompts answered again."""
    row = json.loads(line)
    return isinstance(row, dict) and row_of(str(row.get("id"))) in ids


def _rewritten(job: Job, directory: Path, num_rows: int) -> Rewritten:
    uri = directory.as_uri()
    try:
        before = check_manifest(directory)
    except ValueError:  # torn, and so never read again: nothing of it is worth keeping
        return Rewritten(snapshot=uri, sha256="", became="", became_sha256="", rows=num_rows)
    final = directory.with_name(f"{directory.name}.{job.certificate.number}")
    if not final.exists():
        with staged(final) as staging:
            for file in sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST_NAME):
                target = staging / file.relative_to(directory)
                target.parent.mkdir(parents=True, exist_ok=True)
                if file.parent == directory and file.stem in PARTS and file.suffix == ".jsonl":
                    with file.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as kept:
                        kept.writelines(line for line in lines if not _is_of(line, job.ids))
                else:
                    shutil.copyfile(file, target)
    became = publish(final, KIND)
    return Rewritten(snapshot=uri, sha256=before, became=became.uri, became_sha256=became.sha256, rows=num_rows)


def _point(job: Job, rewritten: Rewritten) -> None:
    registry = open_registry(job.settings)
    for version in registry.versions("draft"):
        for uri, sha256 in TAGS.items():
            if version.tags.get(uri) == rewritten.snapshot:
                registry.tag(version, uri, rewritten.became)
                if sha256:
                    registry.tag(version, sha256, rewritten.became_sha256)


def _descendants(versions: Sequence[Version], drafts: dict[int, dict[str, int]]) -> list[int]:
    """Return the versions, oldest first, that were trained on from drafts that were trained on the rows."""
    saw = {number for number, roles in drafts.items() if roles.keys() - {"regression", "held_out"}}
    found: list[int] = []
    for version in versions:
        if {version.lineage.parent, version.lineage.continues} & saw and version.number not in saw:
            found.append(version.number)
            saw.add(version.number)
    return [number for number in found if number not in drafts]
