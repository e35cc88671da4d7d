"""Rows for tests of the query log, and a Python of its own to be killed or limited."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import text

from infra.consent import Consent, QueryRow
from infra.erasures import DONE, Certificate
from infra.querylog import QueryLog

ROOT = Path(__file__).parents[2]


def row(name: str, domain: str = "chat", consent: Consent = "full", subject: str | None = None) -> QueryRow:
    content = {"prompt": f"prompt of {name}", "completion_ids": [1, 2]} if consent == "full" else {}
    return QueryRow(
        id=name,
        time_ms=int(name.strip("abcdefghijklmnopqrstuvwxyz-") or 0),
        subject=subject,
        domain=domain,
        consent=consent,
        scrubber_revision=1,
        target_version=1,
        draft_version=None,
        finish_reason="stop",
        speculating=False,
        **content,
    )


def address(argument: str) -> Path | str:
    """Return where a log is, from the command line of a script."""
    return argument if "://" in argument else Path(argument)


def content_of(log: QueryLog) -> bytes:
    """Return all bytes of a log's files, free pages and write-ahead log included; on Postgres of its tables' files."""
    if log.database.file is not None:
        return b"".join(path.read_bytes() for path in log.database.file.parent.iterdir())
    with log.database.autocommitting() as connection:
        connection.execute(text("CHECKPOINT"))
        inside = "relnamespace = to_regnamespace(current_schema())"
        mine = f"SELECT oid FROM pg_class WHERE {inside} UNION SELECT reltoastrelid FROM pg_class WHERE {inside}"
        files = f"SELECT pg_relation_filepath(oid) AS file FROM ({mine}) AS mine"
        contents = connection.scalars(text(f"SELECT pg_read_binary_file(file) FROM ({files}) AS f WHERE file <> ''"))
        return b"".join(contents)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run_python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)


@contextmanager
def running_python(script: str, *arguments: object) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Yield a process that runs a script, and the first line that it prints; it is killed at the end."""
    argv, pipe = [sys.executable, "-c", script, *map(str, arguments)], subprocess.PIPE
    with subprocess.Popen(argv, env=environment(), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def erase(log: QueryLog, *subjects: str, older_than_ms: int | None = None) -> Certificate:
    """Erase rows from the log alone."""
    certificate = log.erasures.begin(subjects, older_than_ms)
    log.erasures.forget(certificate.number)
    log.erasures.enter(certificate, DONE)
    return certificate
