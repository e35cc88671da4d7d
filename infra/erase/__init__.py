"""Erasing people's rows, and all that was made of their text, from a home folder.

Rows leave the log first, in one transaction; then each store gives up what it made of them; then every other file is
searched for their text; the text itself, which that takes, goes last. After each step the journal (`infra.erasures`)
knows what was done, so that an erasure that was killed anywhere is completed by `finish_erasures`, which `redraft
up`, `serve`, `refresh`, `clean` and the next erasure call. Each step may be repeated. An erasure that finds no row is
in the journal alone, for the service to forget its recent answers.

What can't be undone: weights that were trained on the rows. The certificate names them.
"""

import re
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from infra.consent import subject_of
from infra.database import DatabaseUnavailable
from infra.erase.job import Job
from infra.erase.leftovers import remove_captured, remove_scores, remove_work, sweep_post_promotion
from infra.erase.residue import forget_text, redact_residue
from infra.erase.snapshots import name_drafts, rewrite_snapshots
from infra.erasures import DONE, Certificate
from infra.files import write_atomic
from infra.keys import keys_path, read_keys
from infra.querylog import QueryLog
from infra.settings import Settings

FOLDER = "erasures"
WAIT_S = 3600.0
HASHED = re.compile(r"[0-9a-f]{64}")

# Whatever keeps text of rows, or what was computed from it, in files of its own registers here. A store takes the job,
# removes what belongs to `job.ids`, and keeps what it did by `job.keep`; it must find its way when it was killed in the
# middle before.
STORES: Mapping[str, Callable[[Job], None]] = {
    "snapshots": rewrite_snapshots,
    "drafts": name_drafts,
    "scores": remove_scores,
    "work folders": remove_work,
    "the post-promotion test": sweep_post_promotion,
    "captured states": remove_captured,
    "everything else": redact_residue,
}


def erase_subject(settings: Settings, subject: str, wait_s: float = WAIT_S) -> Certificate:
    """Erase what a person asked and was answered, named by the hash in the log or by a name that a client gave.

    In the certificate `rows` is 0 where no row was found, and then no file is written; it is that of an earlier erasure
    of the same person if one was completed with it, which was killed or had to wait before. TimeoutError if somebody
    still reads rows: they are out of the log, and the next erasure or start goes on.
    """
    return _erase(settings, wait_s, QueryLog(settings.querylog).erasures.begin(subjects_of(settings, subject)))


def erase_older_than(settings: Settings, days: float, wait_s: float = WAIT_S) -> Certificate:
    older_than_ms = int((time.time() - days * 24 * 3600) * 1000)
    return _erase(settings, wait_s, QueryLog(settings.querylog).erasures.begin(older_than_ms=older_than_ms))


def finish_erasures(settings: Settings, wait_s: float = 0.0) -> list[Certificate]:
    """Complete the erasures that were killed or had to wait; TimeoutError while rows are read, or StoreUnavailable."""
    log = QueryLog(settings.querylog)
    is_made = not isinstance(settings.querylog, Path) or settings.querylog.is_file()
    if not is_made or not log.erasures.unfinished():
        return []
    with log.unread(wait_s):
        try:
            return [_finish(settings, log, step, certificate) for step, certificate in log.erasures.unfinished()]
        except (DatabaseUnavailable, sqlite3.OperationalError) as error:
            raise TimeoutError(f"an erasure is not complete: {error}") from error


def subjects_of(settings: Settings, subject: str) -> tuple[str, ...]:
    """Return the hashes that a person's rows may stand under: without a key, and with each that was ever accepted."""
    known = (key.sha256 for key in read_keys(keys_path(settings)))
    hashed = [subject_of(key, subject) for key in (None, *settings.api_keys, *known)]
    itself = [subject] if HASHED.fullmatch(subject) else []  # which may be a name all the same: clients send hashes too
    return tuple(one for one in itself + hashed if one is not None)


def certificate_file(settings: Settings, number: int) -> Path:
    return settings.home / FOLDER / f"{number}.json"


def _erase(settings: Settings, wait_s: float, begun: Certificate) -> Certificate:
    numbered = {begun.number: begun} | {one.number: one for one in finish_erasures(settings, wait_s)}
    same = [one for one in numbered.values() if one.number == begun.number or {*one.subjects} & {*begun.subjects}]
    return max(same, key=lambda one: (one.rows > 0, one.number))


def _finish(settings: Settings, log: QueryLog, step: int, certificate: Certificate) -> Certificate:
    job = Job(settings, log, step, certificate)
    for number, store in enumerate(STORES.values()):
        if number >= step:
            store(job)
            job.done(number + 1)
    forget_text(job)
    job.certificate = job.certificate.with_(ended_ms=int(time.time() * 1000))
    file = certificate_file(settings, certificate.number)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(file, job.certificate.model_dump_json(indent=1) + "\n")
    log.erasures.enter(job.certificate, DONE)
    return job.certificate
