"""The query log: a durable, ordered record of served requests, which windows of training data are claimed from.

Rows are numbered by `seq`, and a number is never given twice, erased rows included. Text of a row whose consent is not
"full" is refused here, whatever the caller did before.
"""

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from infra.consent import Consent, QueryRow, require_loggable
from infra.logfile import ENDED, count, counter
from infra.windows import Attempt, SetAside, Window, Windows, attempt_at, shrink_claim, windows_set_aside

ERASED = "the error was erased with rows of the window"


class ErasedReport(BaseModel):
    """What an erasure removed.

    Attributes:
        rows: how many.
        seqs: their numbers, ascending.
        windows: the windows, committed or set aside, that had held any of them; snapshots made of these must be
            rewritten, and drafts that name them in their lineage saw the rows.
        probes: domain to how many of them were in its probe set, which others will take the places of.
        wal_cleared: whether the write-ahead log was emptied. If a reader prevented it, erase again later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    seqs: tuple[int, ...]
    windows: tuple[Window, ...]
    probes: dict[str, int]
    wal_cleared: bool


class LogStats(BaseModel):
    """What the log holds, for the dashboard.

    Attributes:
        depth: rows with full consent after the cursor.
        bytes: of the files.
        attempt: at the open window; None if none is open.
        set_aside: windows that no attempt got through, oldest first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    depth: int
    total: int
    per_domain: dict[str, int]
    cursor: int
    dropped: int
    duplicates: int
    bytes: int
    attempt: Attempt | None
    set_aside: tuple[SetAside, ...]


class QueryLog(Windows):
    """The rows of a log, and its windows."""

    def append(self, rows: Sequence[QueryRow], dropped: int = 0) -> int:
        """Write rows in one transaction; a row whose id is there already is left out and counted.

        Args:
            rows: without `seq`.
            dropped: rows lost before they came here, added to the persistent count.

        Returns:
            How many rows were new.

        Raises:
            ValueError: a row may not be written (`require_loggable`); then none is.
            sqlite3.Error: the database is locked, full or broken; then none is.
        """
        for row in rows:
            require_loggable(row)
        with self.transaction() as db:
            num_new = 0
            for row in rows:
                body = json.dumps(row.model_dump(exclude={"seq"}), ensure_ascii=False, allow_nan=False)
                num_new += db.execute(
                    "INSERT OR IGNORE INTO rows (id, time_ms, subject, domain, consent, body)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    (row.id, row.time_ms, row.subject, row.domain, row.consent, body),
                ).rowcount
            count(db, "duplicates", len(rows) - num_new)
            count(db, "dropped", dropped)
        return num_new

    def rows(self, first_seq: int, last_seq: int, consent: Consent = "full") -> list[QueryRow]:
        """Return the rows of one consent level from `first_seq` to `last_seq`, both included, by seq."""
        return self._read("seq BETWEEN ? AND ? AND consent = ?", (first_seq, last_seq, consent))

    def rows_of(self, seqs: Iterable[int]) -> list[QueryRow]:
        """Return the rows of these numbers that there are, of any consent, by seq."""
        return self._read("seq IN (SELECT value FROM json_each(?))", (json.dumps(list(seqs)),))

    def latest(self, num_rows: int) -> list[QueryRow]:
        """Return the last rows, of any consent, by seq."""
        return self._read("seq IN (SELECT seq FROM rows ORDER BY seq DESC LIMIT ?)", (num_rows,))

    def replay(self, per_domain: int, before_seq: int, seed: int = 0) -> list[QueryRow]:
        """Return up to `per_domain` rows with full consent of each domain before `before_seq`, by seq.

        The rows with the smallest hashes of seed and id are taken: the same seed gives the same rows, and new rows
        only displace some of them. Rows of windows that were set aside are among them: this is how they come back.
        Members of probe sets are not, since they are never trained on.
        """
        hashed: dict[str, list[tuple[bytes, int]]] = {}
        query = "SELECT domain, id, seq FROM rows WHERE consent = 'full' AND seq < ?"
        query += " AND seq NOT IN (SELECT seq FROM probes)"
        for domain, row_id, seq in self.connection().execute(query, (before_seq,)):
            key = hashlib.sha256(f"{seed} {row_id}".encode()).digest()
            hashed.setdefault(domain, []).append((key, seq))
        seqs = [seq for keys in hashed.values() for _, seq in heapq.nsmallest(per_domain, keys)]
        return self.rows_of(seqs)

    def erase(self, subject: str) -> ErasedReport:
        """Delete every row of a hashed subject, from the file's free pages and its write-ahead log too."""
        return self._erase("subject = ?", subject)

    def erase_older_than(self, time_ms: int) -> ErasedReport:
        """Delete every row served before `time_ms`, in the same way."""
        return self._erase("time_ms < ?", time_ms)

    def waiting(self) -> tuple[dict[str, Counter[Consent]], int | None]:
        """Return domain to the number of rows after the cursor, by consent, and when the first of them was served."""
        counts: dict[str, Counter[Consent]] = {}
        first_ms: int | None = None
        query = "SELECT domain, consent, count(*), min(time_ms) FROM rows WHERE seq > ? GROUP BY domain, consent"
        for domain, consent, number, served_ms in self.connection().execute(query, (self.cursor(),)):
            counts.setdefault(domain, Counter())[consent] = number
            first_ms = served_ms if first_ms is None else min(first_ms, served_ms)
        return counts, first_ms

    def stats(self) -> LogStats:
        """Count what the log holds."""
        db = self.connection()
        cursor = counter(db, "cursor")
        depth = db.execute("SELECT count(*) FROM rows WHERE consent = 'full' AND seq > ?", (cursor,)).fetchone()[0]
        per_domain = dict(db.execute("SELECT domain, count(*) FROM rows GROUP BY domain ORDER BY domain").fetchall())
        files = [self.path, self.path.with_name(self.path.name + "-wal")]
        return LogStats(
            depth=depth,
            total=sum(per_domain.values()),
            per_domain=per_domain,
            cursor=cursor,
            dropped=counter(db, "dropped"),
            duplicates=counter(db, "duplicates"),
            bytes=sum(file.stat().st_size for file in files if file.exists()),
            attempt=attempt_at(db),
            set_aside=windows_set_aside(db),
        )

    def _erase(self, condition: str, value: str | int) -> ErasedReport:
        with self.transaction() as db:
            found = db.execute(f"SELECT seq FROM rows WHERE {condition} ORDER BY seq", (value,)).fetchall()
            seqs = tuple(seq for (seq,) in found)
            windows = [
                Window(**dict(zip(Window.model_fields, columns, strict=True)))
                for columns in db.execute(
                    f"""WITH windows AS (SELECT * FROM committed
                    UNION ALL SELECT first_seq, last_seq, num_rows, sha256, owner FROM set_aside)
                    SELECT * FROM windows WHERE EXISTS (SELECT 1 FROM rows WHERE {condition}
                    AND consent = 'full' AND seq BETWEEN first_seq AND last_seq) ORDER BY first_seq""",
                    (value,),
                )
            ]
            db.execute(
                f"""UPDATE attempts SET error = '{ERASED}' WHERE error != '{ENDED}' AND EXISTS
                (SELECT 1 FROM rows WHERE {condition} AND seq BETWEEN first_seq AND last_seq)""",
                (value,),
            )
            probes = db.execute(
                f"SELECT domain, count(*) FROM probes JOIN rows USING (seq) WHERE {condition} GROUP BY domain", (value,)
            ).fetchall()
            db.execute(f"DELETE FROM rows WHERE {condition}", (value,))
            shrink_claim(db)
        busy = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        return ErasedReport(
            rows=len(seqs), seqs=seqs, windows=tuple(windows), probes=dict(probes), wal_cleared=not busy
        )

    def _read(self, condition: str, values: tuple[object, ...]) -> list[QueryRow]:
        query = f"SELECT seq, body FROM rows WHERE {condition} ORDER BY seq"
        return [QueryRow(seq=seq, **json.loads(body)) for seq, body in self.connection().execute(query, values)]
