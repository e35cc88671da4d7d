"""Erasures of a log: which rows are to go, how far that has come, and which snapshots they were read into.

The rows of an erasure leave the log at once, in one transaction with its entry in the journal. Their text is kept
apart, because it takes knowing a text to find it again in files, and is the last to go (`infra.erase`). What was found
is written to the journal after each step, so that an erasure that was killed is completed by the next one.
"""

import json
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from infra.consent import QueryRow
from infra.logfile import ENDED, LogFile
from infra.windows import Window, shrink_claim
from models.types import Frozen

ERASED = "the error was erased with rows of the window"
DONE = -1
BY_AGE = "time_ms < ?1"
BY_SUBJECT = """seq IN (
    SELECT seq FROM rows WHERE subject IN (SELECT value FROM json_each(?1)) UNION
    SELECT seq FROM rows WHERE json_extract(body, '$.aliases') IS NOT NULL AND EXISTS (
        SELECT 1 FROM json_each(body, '$.aliases') WHERE value IN (SELECT value FROM json_each(?1))))"""
Role = Literal["train", "replay", "held_out", "regression"]


class Rewritten(Frozen):
    """A snapshot that held `rows` erased rows, and what is left of it; `became` is "" where nothing else was in it."""

    snapshot: str
    sha256: str
    became: str
    became_sha256: str
    rows: int


class Certificate(Frozen):
    """What an erasure did, without any text.

    Attributes:
        subjects: hashes of whom it was for; none where it went by age.
        older_than_ms: rows served before this Unix time; None where it went by subject.
        regression_rows: domain to how many of them were in its regression set.
        windows: that they had been claimed in, as far as known.
        drafts: version to what it saw of the rows, role to number; weights can't unlearn.
        descendants: versions that were trained on from one of these.
        redacted: file to how many places were overwritten in it.
    """

    number: int = 0
    subjects: tuple[str, ...] = ()
    older_than_ms: int | None = None
    began_ms: int
    ended_ms: int | None = None
    rows: int = 0
    sketches: int = 0
    regression_rows: dict[str, int] = Field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    snapshots: tuple[Rewritten, ...] = ()
    drafts: dict[int, dict[str, int]] = Field(default_factory=dict)
    descendants: tuple[int, ...] = ()
    removed: tuple[str, ...] = ()
    redacted: dict[str, int] = Field(default_factory=dict)

    def with_(self, **changes: Any) -> "Certificate":
        return self.model_copy(update=changes)


class Erasures:
    def __init__(self, file: LogFile) -> None:
        self._file = file

    def record_reads(self, snapshot: str, ids_of_role: Mapping[Role, Iterable[str]]) -> None:
        """Record which rows go into a snapshot, and as what; ids that are no row's are left out."""
        query = """INSERT OR IGNORE INTO reads SELECT seq, ?1, ?2 FROM
            (SELECT seq, id FROM rows UNION ALL SELECT seq, id FROM erasing)
            WHERE id IN (SELECT value FROM json_each(?3))"""
        with self._file.transaction() as db:
            for role, ids in ids_of_role.items():
                db.execute(query, (snapshot, role, json.dumps(list(ids))))

    def reads_of(self, seqs: Iterable[int]) -> dict[str, Counter[str]]:
        """Return snapshot to what it read of some rows, role to number."""
        query = """SELECT snapshot, role, count(*) FROM reads
            WHERE seq IN (SELECT value FROM json_each(?)) GROUP BY snapshot, role"""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for snapshot, role, number in self._file.connection().execute(query, (json.dumps(list(seqs)),)):
            found[snapshot][role] = number
        return dict(found)

    def begin(self, subjects: tuple[str, ...] = (), older_than_ms: int | None = None) -> Certificate:
        """Take rows out of the log and enter their erasure in the journal, in one transaction; of none it is complete.

        They are those of the subjects' hashes, as aliases too, or, if given, those served before a Unix time.
        """
        condition = BY_SUBJECT if older_than_ms is None else BY_AGE
        value = json.dumps(subjects) if older_than_ms is None else older_than_ms
        start = Certificate(subjects=subjects, older_than_ms=older_than_ms, began_ms=int(time.time() * 1000))
        with self._file.transaction() as db:
            number = db.execute("INSERT INTO erasures (step, certificate) VALUES (0, '')").lastrowid
            found = f"INSERT INTO erasing SELECT seq, ?2, id, consent, body FROM rows WHERE {condition}"
            db.execute(found, (value, number))
            certificate = _counted(db, start.with_(number=number))
            db.execute(
                f"""UPDATE attempts SET error = '{ERASED}' WHERE error != '{ENDED}' AND EXISTS
                (SELECT 1 FROM erasing WHERE erasure = ? AND seq BETWEEN first_seq AND last_seq)""",
                (number,),
            )
            db.execute("DELETE FROM rows WHERE seq IN (SELECT seq FROM erasing WHERE erasure = ?)", (number,))
            shrink_claim(db)
            _enter(db, certificate, 0 if certificate.rows else DONE)
        return certificate

    def unfinished(self) -> list[tuple[int, Certificate]]:
        """Return the next step and the certificate so far of each erasure that is not complete, oldest first."""
        query = "SELECT step, certificate FROM erasures WHERE step >= 0 ORDER BY number"
        found = self._file.connection().execute(query).fetchall()
        return [(step, Certificate.model_validate_json(certificate)) for step, certificate in found]

    def rows(self, number: int) -> list[QueryRow]:
        query = "SELECT seq, body FROM erasing WHERE erasure = ? ORDER BY seq"
        found = self._file.connection().execute(query, (number,))
        return [QueryRow(seq=seq, **json.loads(body)) for seq, body in found]

    def enter(self, certificate: Certificate, step: int) -> None:
        """Write what an erasure has done so far to the journal, and which step is the next; DONE if none is."""
        with self._file.transaction() as db:
            _enter(db, certificate, step)

    def forget(self, number: int) -> None:
        """Delete the text of an erasure's rows, and empty the write-ahead log unless a reader prevents it."""
        with self._file.transaction() as db:
            db.execute("DELETE FROM erasing WHERE erasure = ?", (number,))
        self._file.empty_wal()


def _enter(db: sqlite3.Connection, certificate: Certificate, step: int) -> None:
    query = "UPDATE erasures SET step = ?, certificate = ? WHERE number = ?"
    db.execute(query, (step, certificate.model_dump_json(), certificate.number))


def _counted(db: sqlite3.Connection, certificate: Certificate) -> Certificate:
    """Add what the rows of an erasure are part of, before they leave the log."""
    mine = "(SELECT seq FROM erasing WHERE erasure = ?)"
    number = (certificate.number,)
    rows = db.execute(f"SELECT count(*) FROM {mine}", number).fetchone()[0]
    sketches = db.execute(f"SELECT count(*) FROM sketches WHERE seq IN {mine}", number).fetchone()[0]
    members = "SELECT domain, count(*) FROM regression_sets JOIN rows USING (seq)"
    held = db.execute(f"{members} WHERE seq IN {mine} GROUP BY domain", number).fetchall()
    windows = db.execute(
        """WITH windows AS (SELECT * FROM committed UNION ALL
        SELECT first_seq, last_seq, num_rows, sha256, owner FROM set_aside UNION ALL
        SELECT first_seq, last_seq, num_rows, sha256, owner FROM claim)
        SELECT * FROM windows WHERE EXISTS (SELECT 1 FROM erasing WHERE erasure = ?
        AND consent = 'full' AND seq BETWEEN first_seq AND last_seq) ORDER BY first_seq""",
        number,
    ).fetchall()
    named = tuple(Window(**dict(zip(Window.model_fields, columns, strict=True))) for columns in windows)
    return certificate.with_(rows=rows, sketches=sketches, regression_rows=dict(held), windows=named)
