"""A home as one file, taken while it is served, and brought back into an empty home or into itself.

Databases are copied by SQLite's online backup, at one moment each; the query log and the registry come before the files
that they name, so that none is missing. What can be made again stays out, and so do the secrets that only this machine
needs; the one that splits traffic and the hashes of keys go with it.

What was erased since a backup was taken is erased again when it is brought back into its own home. An empty home knows
nothing of that.
"""

import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from pydantic import ValidationError

from infra.artifacts import WEIGHTS, file_sha256
from infra.database import TORN, copy_database
from infra.erase import FOLDER, finish_erasures
from infra.erasures import Certificate
from infra.files import LEFTOVER, replacing
from infra.home import COPIES, FORMAT, FORMAT_FILE, SPLIT_KEY, open_home
from infra.keys import keys_path
from infra.post_promotion import POST_PROMOTION
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import Settings, sqlite_file
from infra.tables import SCHEMA_VERSION
from infra.trigger_store import TriggerStore
from infra.versions import SNAPSHOT_TAGS
from models.types import Frozen

CONTENTS, ARTIFACTS, REGISTRY = "backup.json", "artifacts", "mlflow.db"
BUSY_S, PAGES, PAUSE_S = 30.0, 1024, 0.01
# Table, column and condition of what names a file in the registry.
ADDRESSES = (
    ("experiments", "artifact_location", "TRUE"),
    ("runs", "artifact_uri", "TRUE"),
    ("logged_models", "artifact_location", "TRUE"),
    ("model_versions", "source", "TRUE"),
    ("model_versions", "storage_location", "TRUE"),
    ("model_version_tags", "value", f"key IN {SNAPSHOT_TAGS}"),
)


class Contents(Frozen):
    """What a backup says of itself.

    Attributes:
        home, artifacts: where they lay; the registry names its files by these.
        files: databases and small files to the sha256 of their content; directories have manifests of their own.
    """

    home_format: int
    log_schema: int
    made_ms: int
    home: str
    artifacts: str
    files: dict[str, str]


def databases(settings: Settings) -> dict[str, Path]:
    """Return name to file of the home's databases; a registry that is a server's is not among them."""
    if not isinstance(settings.querylog, Path):
        raise ValueError("the query log is on Postgres, whose own tools back it up and bring it back: use pg_dump")
    found = {"queries.db": settings.querylog}
    if (registry := sqlite_file(settings.mlflow_uri)) is not None:
        found[REGISTRY] = registry
    return found


def copy_databases(settings: Settings, folder: Path, but: Collection[str] = ()) -> list[str]:
    there = {name: file for name, file in databases(settings).items() if file.is_file() and name not in but}
    for name, file in there.items():
        copy_database(file, folder / name)
    return list(there)


def back_up(settings: Settings, file: Path) -> Contents:
    """Write the home into one file; ValueError if there is nothing to keep, or `file` can't be written."""
    if not any(one.is_file() for one in databases(settings).values()):
        raise ValueError(f"{settings.home} holds nothing yet; run: redraft build --recipe FILE")
    if not file.parent.is_dir() or file.is_dir():
        raise ValueError(f"{file} can't be written: wanted the name of a file in a folder that there is")
    with (
        tempfile.TemporaryDirectory(dir=file.parent, prefix=".backup-") as folder,
        QueryLog(settings.querylog).reading(),  # no erasure takes files away meanwhile
    ):
        work = Path(folder)
        small = copy_databases(settings, work)
        for source in (settings.home / FORMAT_FILE, keys_path(settings), settings.home / SPLIT_KEY):
            if source.is_file():
                shutil.copyfile(source, work / source.name)
                small.append(source.name)
        contents = Contents(
            home_format=FORMAT,
            log_schema=SCHEMA_VERSION,
            made_ms=int(time.time() * 1000),
            home=str(settings.home),
            artifacts=str(settings.local_artifacts),
            files={name: file_sha256(work / name) for name in small},
        )
        (work / CONTENTS).write_text(contents.model_dump_json(indent=1))
        with replacing(file) as temporary, tarfile.open(temporary, "w") as archive:
            for name in (CONTENTS, *small):
                archive.add(work / name, name)
            for name, root in _roots(settings).items():
                for path in _kept(root):
                    with suppress(FileNotFoundError):  # what was removed meanwhile is named by nothing
                        archive.add(path, f"{name}/{path.relative_to(root).as_posix()}", recursive=False)
    return contents


def restore(settings: Settings, file: Path, wait_s: float) -> tuple[Contents, Path | None]:
    """Bring a backup back into an empty home, or the one that it was taken of; a service there goes on.

    Also returns the folder of copies of the databases that were there; None if none were.

    Raises:
        ValueError: it is no backup, it is damaged, another version took it, or the home is another one.
        TimeoutError: somebody still reads rows, or writes to a database.
    """
    home, copies, torn, found = settings.home, None, set[str](), databases(settings)
    with tempfile.TemporaryDirectory(dir=home, prefix=".restore-") as folder:
        work = Path(folder)
        contents = _unpack(file, work)
        if any(one.is_file() for one in found.values()):
            own, theirs = settings.home / SPLIT_KEY, work / SPLIT_KEY
            if not own.is_file() or not theirs.is_file() or own.read_bytes() != theirs.read_bytes():
                raise ValueError(
                    f"{home} is not empty, and {file} was taken of another home; set REDRAFT_HOME to a new folder"
                )
            copies = home / COPIES / f"before-restore-{int(time.time() * 1000)}"
            copies.mkdir(mode=0o700, parents=True)
            torn = _copy_torn(settings, copies)
            copy_databases(settings, copies, torn)
        log = QueryLog(settings.querylog)
        with log.unread(wait_s), open_registry(settings).alone():
            if "queries.db" not in torn and TriggerStore(settings.querylog).state().running:
                raise TimeoutError("a refresh runs; wait for its end, or stop it")
            erased = _certificates(settings) + ([] if "queries.db" in torn else log.erasures.certificates())
            log.close()
            _bring_files(settings, work)
            for name, target in found.items():
                if (source := work / name).is_file():
                    if name == REGISTRY:
                        _move(source, contents, settings)
                    if name in torn:  # nobody can read it; in one step, so that no row comes between
                        for suffix in ("-wal", "-shm"):
                            target.with_name(target.name + suffix).unlink(missing_ok=True)
                        _place(source, target)
                    else:
                        _overwrite(source, target)
        known = {one.began_ms for one in log.erasures.certificates()}
        for begun in {one.began_ms: one for one in erased if one.began_ms not in known}.values():
            log.erasures.begin(begun.subjects, begun.older_than_ms)
        log.close()
    open_home(settings)
    finish_erasures(settings, wait_s)
    return contents, copies


def _unpack(file: Path, work: Path) -> Contents:
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    try:
        with tarfile.open(file) as archive:
            archive.extractall(work, filter=_taken_out)  # noqa: S202 - which checks each file
        contents = Contents.model_validate_json((work / CONTENTS).read_bytes())
    except (tarfile.TarError, EOFError, FileNotFoundError, ValidationError) as error:
        raise ValueError(f"{file} is no backup of redraft's, or it is torn: {str(error).splitlines()[0]}") from error
    if (contents.home_format, contents.log_schema) != (FORMAT, SCHEMA_VERSION):
        raise ValueError(f"{file} was taken by another version of redraft, and only that one reads it")
    for name, sha256 in contents.files.items():
        if not (work / name).is_file() or file_sha256(work / name) != sha256:
            raise ValueError(f"{file} is damaged: {name} is not what was backed up")
    return contents


def _taken_out(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Check a file of an archive; a link may lead to weights that stay where their owner has them."""
    links = member.issym() and member.name.endswith(WEIGHTS)
    return (tarfile.tar_filter if links else tarfile.data_filter)(member, folder)


def _copy_torn(settings: Settings, copies: Path) -> set[str]:
    torn = set()
    for name, file in databases(settings).items():
        if not file.is_file():
            continue
        try:
            with closing(sqlite3.connect(file, timeout=BUSY_S)) as db:
                db.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode not in TORN:
                raise
            torn.add(name)
            shutil.copyfile(file, copies / f"{name}.torn")
    return torn


def _bring_files(settings: Settings, work: Path) -> None:
    """Put directories and small files where there are none; what is there stays, keys above all."""
    for name in (FORMAT_FILE, keys_path(settings).name, SPLIT_KEY):
        if (work / name).is_file() and (name == FORMAT_FILE or not (settings.home / name).is_file()):
            _place(work / name, settings.home / name)
    for name, root in _roots(settings).items():
        for path in _kept(work / name):
            target = root / path.relative_to(work / name)
            if os.path.lexists(target):
                continue
            if path.is_symlink():
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                target.symlink_to(path.readlink())
            elif path.is_file():
                _place(path, target)


def _place(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)


def _move(database: Path, contents: Contents, settings: Settings) -> None:
    """Have a database name this home's folders where it named those of the home that was backed up.

    Only addresses that begin with such a folder change: a path in a user's text is the user's.
    """
    folders = [(contents.artifacts, str(settings.local_artifacts)), (contents.home, str(settings.home))]
    prefixes = [(f"file://{quote(old)}/", f"file://{quote(new)}/") for old, new in folders]
    prefixes += [(f"{old}/", f"{new}/") for old, new in folders]

    def moved(address: str) -> str:
        old, new = next((pair for pair in prefixes if address.startswith(pair[0])), ("", ""))
        return new + address.removeprefix(old)

    with closing(sqlite3.connect(database, isolation_level=None)) as db:
        db.create_function("moved", 1, moved, deterministic=True)
        for table, column, which in ADDRESSES:
            db.execute(f'UPDATE "{table}" SET "{column}" = moved("{column}") WHERE "{column}" IS NOT NULL AND {which}')


def _overwrite(source: Path, target: Path) -> None:
    """Replace a database's content, page by page, so that who has it open reads the new one."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    until_s = time.monotonic() + BUSY_S

    def still(status: int, remaining: int, total: int) -> None:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{target}: somebody keeps writing to it")

    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target, timeout=BUSY_S)) as written:
        read.backup(written, pages=PAGES, progress=still, sleep=PAUSE_S)


def _certificates(settings: Settings) -> list[Certificate]:
    files = sorted((settings.home / FOLDER).glob("[0-9]*.json"))
    return [Certificate.model_validate_json(file.read_bytes()) for file in files]


def _roots(settings: Settings) -> dict[str, Path]:
    return {ARTIFACTS: settings.local_artifacts, **{name: settings.home / name for name in (POST_PROMOTION, FOLDER)}}


def _kept(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        at_work = "work" if Path(folder) == root else ""
        folders[:] = [name for name in sorted(folders) if name != at_work and not LEFTOVER.fullmatch(name)]
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
