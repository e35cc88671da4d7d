"""The query log: a durable, ordered record of served requests, which windows of training data are claimed from.

Rows are numbered by `seq`, and a number is never given twice, erased rows included.
"""

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from infra.consent import Consent, QueryRow
from infra.erasures import Erasures
from infra.logfile import LogFile, counter
from infra.regression_sets import RegressionSets, Sketches
from infra.windows import Attempt, SetAside, Windows, attempt_at, windows_set_aside
from models.types import Frozen


class LogStats(Frozen):
    """What the log holds; `depth` is rows with full consent after the cursor."""

    depth: int
    total: int
    per_domain: dict[str, int]
    cursor: int
    dropped: int
    duplicates: int
    bytes: int
    attempt: Attempt | None
    set_aside: tuple[SetAside, ...]


class QueryLog(LogFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.windows, self.erasures = Windows(self), Erasures(self)
        self.regression_sets, self.sketches = RegressionSets(self), Sketches(self)

    def rows(self, first_seq: int, last_seq: int, consent: Consent = "full") -> list[QueryRow]:
        """Return the rows of one consent level from `first_seq` to `last_seq`, both included, by seq."""
        return self._read("seq BETWEEN ? AND ? AND consent = ?", (first_seq, last_seq, consent))

    def ids(self, last_seq: int | None = None) -> list[str]:
        """Return the ids of all rows with full consent, or of those up to `last_seq`."""
        query = "SELECT id FROM rows WHERE consent = 'full' AND seq <= coalesce(?, seq)"
        return [row_id for (row_id,) in self.connection().execute(query, (last_seq,))]

    def rows_of(self, seqs: Iterable[int]) -> list[QueryRow]:
        return self._read("seq IN (SELECT value FROM json_each(?))", (json.dumps(list(seqs)),))

    def latest(self, num_rows: int) -> list[QueryRow]:
        return self._read("seq IN (SELECT seq FROM rows ORDER BY seq DESC LIMIT ?)", (num_rows,))

    def replay(self, per_domain: int, before_seq: int, seed: int = 0) -> list[QueryRow]:
        """Return up to `per_domain` rows with full consent of each domain before `before_seq`, by seq.

        The rows with the smallest hashes of seed and id are taken, so new rows only displace some of them. Members of
        regression sets are not among them, nor rows of windows that were set aside: what no run got through once would
        stop each later one.
        """
        hashed: dict[str, list[tuple[bytes, int]]] = {}
        query = """SELECT domain, id, seq FROM rows WHERE consent = 'full' AND seq < ?
            AND seq NOT IN (SELECT seq FROM regression_sets)
            AND NOT EXISTS (SELECT 1 FROM set_aside WHERE seq BETWEEN first_seq AND last_seq)"""
        for domain, row_id, seq in self.connection().execute(query, (before_seq,)):
            key = hashlib.sha256(f"{seed} {row_id}".encode()).digest()
            hashed.setdefault(domain, []).append((key, seq))
        seqs = [seq for keys in hashed.values() for _, seq in heapq.nsmallest(per_domain, keys)]
        return self.rows_of(seqs)

    def waiting(self) -> tuple[dict[str, Counter[Consent]], int | None]:
        """Return domain to the number of rows after the cursor, by consent, and when the first of them was served."""
        counts: dict[str, Counter[Consent]] = {}
        first_ms: int | None = None
        query = "SELECT domain, consent, count(*), min(time_ms) FROM rows WHERE seq > ? GROUP BY domain, consent"
        for domain, consent, number, served_ms in self.connection().execute(query, (self.windows.cursor(),)):
            counts.setdefault(domain, Counter())[consent] = number
            first_ms = served_ms if first_ms is None else min(first_ms, served_ms)
        return counts, first_ms

    def waiting_domains(self, max_rows: int) -> Counter[str]:
        """Return domain to its rows among the first that wait and may be trained on; `max_rows` are looked at."""
        query = """SELECT domain, count(*) FROM
            (SELECT domain FROM rows WHERE seq > ? AND consent = 'full' ORDER BY seq LIMIT ?) GROUP BY 1"""
        return Counter(dict(self.connection().execute(query, (self.windows.cursor(), max_rows)).fetchall()))

    def served_tau(self, domain: str, num_rows: int = 64) -> float:
        """Return τ over a domain's newest rows after the cursor that a draft drafted alone; 1 without any."""
        query = """SELECT total(json_array_length(body, '$.accepted')),
            total((SELECT sum(value) FROM json_each(body, '$.accepted'))) FROM (SELECT body FROM rows
            WHERE seq > ? AND domain = ? AND json_extract(body, '$.drafting') = 'head' ORDER BY seq DESC LIMIT ?)"""
        steps, accepted = self.connection().execute(query, (self.windows.cursor(), domain, num_rows)).fetchone()
        return 1 + accepted / steps if steps else 1.0

    def acceptance_counts(
        self, draft_version: int, after_seq: int, num_rows: int, server: str | None = None
    ) -> list[tuple[int, str, int, int, int]]:
        """Return (seq, domain, steps, drafted, accepted) of a draft's newest rows that it drafted alone, by seq.

        Only rows that name their server count, and of one server its own.
        """
        of_server = "server = ?" if server is not None else "server IS NOT ?"
        query = f"""SELECT seq, domain, json_array_length(body, '$.drafted'),
            (SELECT sum(value) FROM json_each(body, '$.drafted')),
            (SELECT sum(value) FROM json_each(body, '$.accepted')) FROM rows
            WHERE {of_server} AND seq > ?
            AND json_extract(body, '$.draft_version') = ? AND json_extract(body, '$.drafting') = 'head'
            AND NOT json_extract(body, '$.structured') AND json_array_length(body, '$.drafted') > 0
            ORDER BY seq DESC LIMIT ?"""
        return self.connection().execute(query, (server, after_seq, draft_version, num_rows)).fetchall()[::-1]

    def waiting_groups(self) -> dict[str, Counter[str | None]]:
        """Return domain to the groups of the rows after the cursor that may be trained on; None stands for no group."""
        counts: dict[str, Counter[str | None]] = {}
        query = "SELECT domain, group_hash, count(*) FROM rows WHERE seq > ? AND consent = 'full' GROUP BY 1, 2"
        for domain, group, number in self.connection().execute(query, (self.windows.cursor(),)):
            counts.setdefault(domain, Counter())[group] = number
        return counts

    def last_seq(self) -> int:
        return int(self.connection().execute("SELECT coalesce(max(seq), 0) FROM rows").fetchone()[0])

    def waiting_keys(self, max_rows: int) -> tuple[Counter[str | None], int | None]:
        """Return the hashed API keys of the first rows that wait and may be trained on, and when the first came."""
        query = """SELECT json_extract(body, '$.key'), count(*), min(time_ms) FROM
            (SELECT body, time_ms FROM rows WHERE seq > ? AND consent = 'full' ORDER BY seq LIMIT ?) GROUP BY 1"""
        found = self.connection().execute(query, (self.windows.cursor(), max_rows)).fetchall()
        served = [served_ms for _, _, served_ms in found]
        return Counter({key: number for key, number, _ in found}), min(served, default=None)

    def stats(self) -> LogStats:
        db = self.connection()
        counters = {name: counter(db, name) for name in ("cursor", "dropped", "duplicates")}
        waiting = "SELECT count(*) FROM rows WHERE consent = 'full' AND seq > ?"
        per_domain = dict(db.execute("SELECT domain, count(*) FROM rows GROUP BY domain ORDER BY domain").fetchall())
        files = [self.path, self.path.with_name(self.path.name + "-wal")]
        return LogStats(
            **counters,
            depth=db.execute(waiting, (counters["cursor"],)).fetchone()[0],
            total=sum(per_domain.values()),
            per_domain=per_domain,
            bytes=sum(file.stat().st_size for file in files if file.exists()),
            attempt=attempt_at(db),
            set_aside=windows_set_aside(db),
        )

    def _read(self, condition: str, values: tuple[object, ...]) -> list[QueryRow]:
        query = f"SELECT seq, body FROM rows WHERE {condition} ORDER BY seq"
        return [QueryRow(seq=seq, **json.loads(body)) for seq, body in self.connection().execute(query, values)]
