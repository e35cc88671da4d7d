"""The rows' text where no store put it on purpose: an error's message in a log, a database of Prefect or MLflow.

Every file of the home is searched, except checked directories: those are snapshots and caches, whose own stores answer
for them, checkpoints, and prompts that were there before anybody asked them.
"""

import bz2
import gzip
import lzma
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeVar

from infra.erase.job import Job
from infra.erase.search import Search, redacted
from infra.files import LEFTOVER
from infra.querylog import STATES
from models.types import MANIFEST_NAME

ERRORS = "errors of attempts at windows"  # the name in a certificate of what is in the log itself
NUM_OTHERS = 2000  # of the latest rows, that say what is not a person's own
SQLITE = b"SQLite format 3\x00"
PACKED: dict[str, ModuleType] = {".gz": gzip, ".bz2": bz2, ".xz": lzma}
NO_TEXT = {".safetensors", ".bin", STATES, ".gguf", ".grid", ".so", ".pyc", ".png"}
BATCH_ROWS = 4000  # a row is some 5,000 different stretches
BUSY_S, POLL_S = 30.0, 0.2
Content = TypeVar("Content", str, bytes)


def redact_residue(job: Job) -> None:
    home = job.settings.home

    def keep(name: str, num_places: int) -> None:
        if num_places:
            total = job.certificate.redacted.get(name, 0) + num_places
            job.keep(redacted={**job.certificate.redacted, name: total})

    for start in range(0, len(job.rows), BATCH_ROWS):
        search = _search(job, start)
        keep(ERRORS, job.log.erasures.redact_errors(partial(_clean, search)))
        for file in sorted(_files(job)):
            with suppress(FileNotFoundError):  # others work in the home too
                name = file.relative_to(home).as_posix() if file.is_relative_to(home) else str(file)
                keep(name, _redact(file, search, job))


def forget_text(job: Job) -> None:
    """Delete the rows' text from the log, its free pages and its write-ahead log; TimeoutError if somebody reads it."""
    search = _search(job, 0) if job.rows else None  # without, the text is gone, and nobody can look for it
    job.log.erasures.forget(job.certificate.number)
    _empty_wal(job)
    job.log.close()  # a process that closes a file loses its locks on it, those of its connections too
    if (file := job.log.database.file) is not None and (search is None or search.stands_in(file)):
        job.log.database.vacuum()
        _empty_wal(job)


def _search(job: Job, start: int) -> Search:
    return Search(job.rows[start : start + BATCH_ROWS], job.log.latest(NUM_OTHERS))


def _empty_wal(job: Job) -> None:
    until_s = time.monotonic() + BUSY_S
    while not job.log.database.empty_wal():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{job.log.database}: somebody reads it, so that its write-ahead log can't be emptied")
        time.sleep(POLL_S)


def _files(job: Job) -> Iterator[Path]:
    roots = {job.settings.home, job.settings.local_artifacts, job.settings.cache}
    outer = [root for root in sorted(roots) if not any(root != one and root.is_relative_to(one) for one in roots)]
    for root in outer:
        for folder, folders, names in os.walk(root):
            if MANIFEST_NAME in names or LEFTOVER.fullmatch(Path(folder).name):
                folders.clear()
                continue
            files = [Path(folder, name) for name in sorted(names)]
            yield from (
                file for file in files if file.suffix not in NO_TEXT and file.is_file() and not file.is_symlink()
            )


def _redact(file: Path, search: Search, job: Job) -> int:
    if file == job.log.database.file:
        return 0  # its rows are deleted, and its free pages emptied, at the end
    if file.name.endswith(("-wal", "-shm")):
        return 0  # its database is searched, and its write-ahead log emptied
    with file.open("rb") as opened:
        is_database = opened.read(len(SQLITE)) == SQLITE
    if is_database:
        return _redact_database(file, search) if _holds(file, search) else 0
    if (packed := PACKED.get(file.suffix)) is not None:
        return _repack(file, search, packed)
    return _redact_plain(file, search)


def _redact_plain(file: Path, search: Search) -> int:
    if not search.stands_in(file):
        return 0
    with file.open("r+b") as opened:
        content = opened.read()
        spans = search.spans(content)
        if spans:  # in place, in the file that was read: whoever appends to it goes on
            opened.seek(0)
            opened.write(redacted(content, spans))
            opened.flush()
            os.fsync(opened.fileno())
        replaced = not _is_at(opened, file)
    return len(spans) + (_redact_plain(file, search) if replaced else 0)


def _repack(file: Path, search: Search, module: ModuleType) -> int:
    with file.open("rb") as packed:
        try:
            with module.open(packed) as opened:
                content = opened.read()
        except (OSError, EOFError, lzma.LZMAError):  # not what its name says
            return _redact_plain(file, search)
        spans = search.spans(content)
        if not spans:
            return 0
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        with module.open(temporary, "wb") as written:
            written.write(redacted(content, spans))
        if _is_at(packed, file):
            temporary.replace(file)
            return len(spans)
    temporary.unlink()
    return _repack(file, search, module)


def _is_at(opened: IO[bytes], file: Path) -> bool:
    return os.path.samestat(os.fstat(opened.fileno()), file.stat())


def _holds(file: Path, search: Search) -> bool:
    """Return whether a database's file or its write-ahead log has the text, in free pages too."""
    files = [file, file.with_name(f"{file.name}-wal")]
    return any(search.stands_in(one) for one in files if one.is_file())


def _redact_database(file: Path, search: Search) -> int:
    """Overwrite the text in all columns of a database; TimeoutError if others keep using it."""
    num_places = 0
    until_s = time.monotonic() + BUSY_S

    def clean(value: Any) -> Any:
        nonlocal num_places
        changed, number = _clean(search, value)
        num_places += number
        return changed

    def holds(value: Any) -> bool:
        return bool(search.spans(value.encode() if isinstance(value, str) else value))

    with closing(sqlite3.connect(file, timeout=BUSY_S, isolation_level=None)) as db:
        db.execute("PRAGMA secure_delete = ON")
        db.create_function("clean", 1, clean, deterministic=True)
        db.create_function("holds", 1, holds, deterministic=True)
        for table, column in _columns(db):
            where = f'typeof("{column}") IN (\'text\', \'blob\') AND length("{column}") >= 24 AND holds("{column}")'
            _execute(db, f'UPDATE "{table}" SET "{column}" = clean("{column}") WHERE {where}', until_s)
        _execute(db, "PRAGMA wal_checkpoint(TRUNCATE)", until_s)
        while _holds(file, search):
            num_places = max(1, num_places)
            if time.monotonic() > until_s:
                raise TimeoutError(f"{file}: others use it, so that a text can't be removed from its free pages")
            _execute(db, "VACUUM", until_s)
            _execute(db, "PRAGMA wal_checkpoint(TRUNCATE)", until_s)
    return num_places


def _clean(search: Search, value: Content) -> tuple[Content, int]:
    """Return a text or bytes with what stands in it overwritten, and how many places that were."""
    content = value.encode() if isinstance(value, str) else value
    spans = search.spans(content)
    changed = redacted(content, spans)
    return (changed.decode(errors="replace") if isinstance(value, str) else changed), len(spans)


def _execute(db: sqlite3.Connection, statement: str, until_s: float) -> None:
    """Execute a statement, again as long as others' transactions keep it from that."""
    while True:
        try:
            db.execute(statement).fetchall()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            if time.monotonic() > until_s:
                raise TimeoutError(f"a database that a text is removed from stays locked: {error}") from error
        time.sleep(POLL_S)


def _columns(db: sqlite3.Connection) -> list[tuple[str, str]]:
    query = """SELECT tables.name, columns.name FROM sqlite_schema AS tables, pragma_table_xinfo(tables.name) AS columns
        WHERE tables.type = 'table' AND tables.name NOT LIKE 'sqlite_%' AND columns.hidden = 0
        AND tables.sql NOT LIKE 'CREATE VIRTUAL%'"""
    return [(str(table), str(column)) for table, column in db.execute(query)]
