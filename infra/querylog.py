"""The query log: a durable, ordered record of served requests, which windows of training data are claimed from.

Rows are numbered by `seq` in the order of their commits, and a number is never given twice, erased rows included. Text
of a row whose consent is not "full" is refused here, whatever the caller did before.

Beside the log lie files of the hidden states that were captured of rows, one a row. They count as text: each goes with
its row, after a training that had the row, or by age. A service writes its rows in a thread (`BackgroundWriter`).
"""

import hashlib
import heapq
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, func, insert, select, update

from infra import tables
from infra.consent import Consent, QueryRow, require_loggable
from infra.database import Database, DatabaseTorn, in_chunks, make_days
from infra.erasures import Erasures
from infra.regression_sets import RegressionSets, Sketches
from infra.windows import Attempt, SetAside, Windows
from models.types import Frozen

ROW = tables.rows.c
FULL = ROW.consent == "full"
READERS = "readers"
IS_THERE = select(ROW.id).where(ROW.id.in_(bindparam("ids", expanding=True)))
COUNT = update(tables.counters).where(tables.counters.c.name == bindparam("counted"))
COUNT = COUNT.values(value=tables.counters.c.value + bindparam("amount"))
NUMBER = COUNT.returning(tables.counters.c.value)
_Made = tuple[dict[str, Any], str, Sequence[str]]  # a row's columns, body and aliases
STATES = ".states"  # ending of a file of hidden states
RETRY_S = 0.5  # between two tries to write what the log did not take
logger = logging.getLogger(__name__)


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


class QueryLog:
    """The log at one address (`infra.database`). Safe to use from several threads and processes."""

    def __init__(self, address: Path | str) -> None:
        self.database = Database(address)
        self.windows, self.erasures = Windows(self.database), Erasures(self.database)
        self.regression_sets, self.sketches = RegressionSets(self.database), Sketches(self.database)

    def close(self) -> None:
        self.database.close()

    def append(self, rows: Sequence[QueryRow], dropped: int = 0) -> int:
        """Write rows in one transaction, and return how many were new; one whose id is there is left out and counted.

        `dropped` rows, which were lost before they came here, are added to the persistent count. ValueError or
        DatabaseUnavailable leaves all unwritten.
        """
        made: dict[str, _Made] = {}
        for row in rows:
            require_loggable(row)
            if row.id not in made:
                made[row.id] = _made(row)
        with self.database.writing() as connection:
            for chunk in in_chunks(list(made)):
                for known in connection.scalars(IS_THERE, {"ids": chunk}):
                    del made[known]
            if made:
                _write(connection, [*made.values()])
            for name, amount in (("duplicates", len(rows) - len(made)), ("dropped", dropped)):
                if amount:
                    connection.execute(COUNT, {"counted": name, "amount": amount})
        return len(made)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep erasures from cleaning up files while rows are turned into files; waits while one does."""
        with self.database.lock(READERS, shared=True):
            yield

    @contextmanager
    def unread(self, wait_s: float) -> Iterator[None]:
        """Wait until nobody turns rows into files, and keep others from it; TimeoutError after `wait_s` seconds."""
        with self.database.lock(READERS, wait_s=wait_s) as is_held:
            if not is_held:
                raise TimeoutError(f"{self.database}: a refresh, an adoption or a post-promotion test is at its rows")
            yield

    def rows(self, first_seq: int, last_seq: int, consent: Consent = "full") -> list[QueryRow]:
        """Return the rows of one consent level from `first_seq` to `last_seq`, both included, by seq."""
        return self._read(ROW.seq.between(first_seq, last_seq) & (ROW.consent == consent))

    def ids(self, last_seq: int | None = None) -> list[str]:
        """Return the ids of all rows with full consent, or of those up to `last_seq`."""
        found = select(ROW.id).where(FULL, ROW.seq <= func.coalesce(last_seq, ROW.seq)).order_by(ROW.seq)
        with self.database.reading() as connection:
            return [*connection.scalars(found)]

    def rows_of(self, seqs: Iterable[int]) -> list[QueryRow]:
        return [row for chunk in in_chunks(sorted({*seqs})) for row in self._read(ROW.seq.in_(chunk))]

    def latest(self, num_rows: int) -> list[QueryRow]:
        return self._read(ROW.seq.in_(select(ROW.seq).order_by(ROW.seq.desc()).limit(num_rows)))

    def replay(self, per_domain: int, before_seq: int, seed: int = 0) -> list[QueryRow]:
        """Return up to `per_domain` rows with full consent of each domain before `before_seq`, by seq.

        The rows with the smallest hashes of seed and id are taken, so new rows only displace some of them. Members of
        regression sets are not among them, nor rows of windows that were set aside: what no run got through once would
        stop each later one.
        """
        hashed: dict[str, list[tuple[bytes, int]]] = {}
        aside = tables.set_aside.c
        found = select(ROW.domain, ROW.id, ROW.seq).where(
            FULL,
            ROW.seq < before_seq,
            ROW.seq.not_in(select(tables.regression_sets.c.seq)),
            ~select(aside.first_seq).where(ROW.seq.between(aside.first_seq, aside.last_seq)).exists(),
        )
        with self.database.reading() as connection:
            for domain, row_id, seq in connection.execute(found):
                key = hashlib.sha256(f"{seed} {row_id}".encode()).digest()
                hashed.setdefault(domain, []).append((key, seq))
        return self.rows_of(seq for keys in hashed.values() for _, seq in heapq.nsmallest(per_domain, keys))

    def waiting(self) -> tuple[dict[str, Counter[Consent]], int | None]:
        """Return domain to the number of rows after the cursor, by consent, and when the first of them was served."""
        counts: dict[str, Counter[Consent]] = {}
        first_ms: int | None = None
        found = select(ROW.domain, ROW.consent, func.count(), func.min(ROW.time_ms)).where(self._waits())
        with self.database.reading() as connection:
            for domain, consent, number, served_ms in connection.execute(found.group_by(ROW.domain, ROW.consent)):
                counts.setdefault(domain, Counter())[consent] = number
                first_ms = served_ms if first_ms is None else min(first_ms, served_ms)
        return counts, first_ms

    def waiting_domains(self, max_rows: int) -> Counter[str]:
        """Return domain to its rows among the first that wait and may be trained on; `max_rows` are looked at."""
        first = select(ROW.domain).where(self._waits(), FULL).order_by(ROW.seq).limit(max_rows).subquery().c
        with self.database.reading() as connection:
            return Counter(
                dict(connection.execute(select(first.domain, func.count()).group_by(first.domain)).tuples().all())
            )

    def served_tau(self, domain: str, num_rows: int = 64) -> float:
        """Return τ over a domain's newest rows after the cursor that a draft drafted alone; 1 without any."""
        newest = select(ROW.steps, ROW.accepted).where(self._waits(), ROW.domain == domain, ROW.drafting == "head")
        of_rows = newest.order_by(ROW.seq.desc()).limit(num_rows).subquery().c
        with self.database.reading() as connection:
            totals = select(func.sum(of_rows.steps), func.sum(of_rows.accepted))
            steps, accepted = connection.execute(totals).one()
        return 1 + int(accepted) / int(steps) if steps else 1.0

    def acceptance_counts(
        self, draft_version: int, after_seq: int, num_rows: int, server: str | None = None
    ) -> list[tuple[int, str, int, int, int]]:
        """Return (seq, domain, steps, drafted, accepted) of a draft's newest rows that it drafted alone, by seq.

        Only rows that name their server count, and of one server its own.
        """
        of_draft = (ROW.draft_version == draft_version) & (ROW.drafting == "head") & ~ROW.structured & (ROW.steps > 0)
        of_server = ROW.server.is_not(None) if server is None else ROW.server == server
        found = select(ROW.seq, ROW.domain, ROW.steps, ROW.drafted, ROW.accepted).where(of_draft, of_server)
        with self.database.reading() as connection:
            newest = connection.execute(found.where(ROW.seq > after_seq).order_by(ROW.seq.desc()).limit(num_rows))
            return [row._tuple() for row in newest][::-1]

    def waiting_groups(self) -> dict[str, Counter[str | None]]:
        """Return domain to the groups of the rows after the cursor that may be trained on; None stands for no group."""
        counts: dict[str, Counter[str | None]] = {}
        found = select(ROW.domain, ROW.group_hash, func.count()).where(self._waits(), FULL)
        with self.database.reading() as connection:
            for domain, group, number in connection.execute(found.group_by(ROW.domain, ROW.group_hash)):
                counts.setdefault(domain, Counter())[group] = number
        return counts

    def last_seq(self) -> int:
        with self.database.reading() as connection:
            return int(connection.execute(select(func.coalesce(func.max(ROW.seq), 0))).scalar_one())

    def waiting_keys(self, max_rows: int) -> tuple[Counter[str | None], int | None]:
        """Return the hashed API keys of the first rows that wait and may be trained on, and when the first came."""
        first = select(ROW.key, ROW.time_ms).where(self._waits(), FULL).order_by(ROW.seq).limit(max_rows).subquery().c
        with self.database.reading() as connection:
            by_key = select(first.key, func.count(), func.min(first.time_ms)).group_by(first.key)
            found = connection.execute(by_key).all()
        served = [served_ms for _, _, served_ms in found]
        return Counter({key: number for key, number, _ in found}), min(served, default=None)

    def stats(self) -> LogStats:
        per_domain = select(ROW.domain, func.count()).group_by(ROW.domain).order_by(ROW.domain)
        with self.database.reading() as connection:
            counters = dict(connection.execute(select(tables.counters.c.name, tables.counters.c.value)).tuples().all())
            by_domain = dict(connection.execute(per_domain).tuples().all())
            return LogStats(
                **{name: counters[name] for name in ("cursor", "dropped", "duplicates")},
                depth=connection.execute(select(func.count()).where(self._waits(), FULL)).scalar_one(),
                total=sum(by_domain.values()),
                per_domain=by_domain,
                bytes=self.database.num_bytes(connection),
                attempt=self.windows.attempt(connection),
                set_aside=self.windows.set_aside(connection),
            )

    def _waits(self) -> ColumnElement[bool]:
        cursor = select(tables.counters.c.value).where(tables.counters.c.name == "cursor")
        return ROW.seq > cursor.scalar_subquery()

    def _read(self, condition: ColumnElement[bool]) -> list[QueryRow]:
        found = select(ROW.seq, tables.bodies.c.body).select_from(tables.WITH_BODY).where(condition).order_by(ROW.seq)
        with self.database.reading() as connection:
            return [QueryRow.of_body(seq, body) for seq, body in connection.execute(found)]


def _made(row: QueryRow) -> _Made:
    """Return what is written of a row, all but its `seq`, which comes with the transaction."""
    columns = {
        "id": row.id,
        "time_ms": row.time_ms,
        "subject": row.subject,
        "domain": row.domain,
        "consent": row.consent,
        "key": row.key,
        "group_hash": row.group,
        "server": row.server,
        "draft_version": row.draft_version,
        "drafting": row.drafting,
        "structured": row.structured,
        "context": None if row.prompt_ids is None else len(row.prompt_ids),
        "steps": len(row.drafted or ()),
        "drafted": sum(row.drafted or ()),
        "accepted": sum(row.accepted or ()),
    }
    return columns, row.body(), tuple(dict.fromkeys(row.aliases or ()))


def _write(connection: Connection, made: Sequence[_Made]) -> None:
    last_seq = connection.execute(NUMBER, {"counted": "seq", "amount": len(made)}).scalar_one()
    numbered = [*enumerate(made, last_seq - len(made) + 1)]
    make_days(connection, (columns["time_ms"] for columns, *_ in made))
    connection.execute(insert(tables.rows), [{"seq": seq, **columns} for seq, (columns, *_) in numbered])
    bodies = [{"seq": seq, "time_ms": columns["time_ms"], "body": body} for seq, (columns, body, _) in numbered]
    connection.execute(insert(tables.bodies), bodies)
    if aliases := [{"seq": seq, "alias": one} for seq, (*_, named) in numbered for one in named]:
        connection.execute(insert(tables.aliases), aliases)


class CapturedFiles:
    """The files of hidden states beside a query log, in a folder that need not exist."""

    def __init__(self, querylog: Path) -> None:
        self.folder = querylog.with_name(f"{querylog.stem}-states")

    def path_of(self, row_id: str) -> Path:
        return self.folder / f"{hashlib.sha256(row_id.encode()).hexdigest()[:32]}{STATES}"

    def make(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def num_bytes(self) -> int:
        return sum(stat.st_size for _, stat in self._files())

    def forget(self, row_ids: Iterable[str]) -> int:
        return sum(_removed(self.path_of(row_id)) for row_id in row_ids)

    def forget_others(self, row_ids: Iterable[str], older_than_s: float) -> int:
        """Remove the files, written longer ago, of all rows but these, and what a killed process left of one."""
        kept = {self.path_of(row_id) for row_id in row_ids}
        return sum(_removed(file) for file in self._before(older_than_s) if file not in kept)

    def forget_older_than(self, days: float) -> int:
        return sum(_removed(file) for file in self._before(days * 24 * 3600))

    def _before(self, older_than_s: float) -> list[Path]:
        return [file for file, stat in self._files() if stat.st_mtime < time.time() - older_than_s]

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # others remove files too
                    yield Path(entry.path), entry.stat()


def _removed(file: Path) -> bool:
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


class BackgroundWriter:
    """Takes rows from request handlers without ever making them wait, and writes them in a thread.

    A batch waits while the database is down, busy or full, and the queue with it. A row that finds the queue full is
    dropped and counted, and so is a batch that a torn log, or one of another schema, refuses; the count is written to
    the log with the next batch that succeeds.
    """

    def __init__(self, log: QueryLog, capacity: int = 1024, batch: int = 256) -> None:
        self.written = 0
        self.dropped = 0
        self.last_error: str | None = None
        self._log = log
        self._batch = batch
        self._queue: queue.Queue[QueryRow | None] = queue.Queue(capacity)  # None wakes the thread at the end
        self._unrecorded = 0  # dropped, and not yet counted in the log
        self._failing = False
        self._lock = threading.Lock()
        self._closing = False
        self._until_s = 0.0  # when a writer that closes gives up
        self._thread = threading.Thread(target=self._drain, name="querylog-writer", daemon=True)
        self._thread.start()

    def offer(self, row: QueryRow) -> bool:
        """Queue a row, or drop and count it; return whether it is queued; ValueError as `require_loggable`."""
        require_loggable(row)
        with self._lock:
            with suppress(queue.Full):
                if not self._closing:
                    self._queue.put_nowait(row)
                    return True
            self._drop(1)
        return False

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and end the thread; what is not written after `timeout_s` seconds counts as dropped."""
        with self._lock, suppress(queue.Full):  # then it is awake
            self._until_s = time.monotonic() + timeout_s
            self._closing = True
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)
        with self._lock:
            self._drop(len(self._take(self._queue.qsize())))

    def _drain(self) -> None:
        while not (self._closing and self._queue.empty()):
            first = self._queue.get()
            self._write([*([] if first is None else [first]), *self._take(self._batch - 1)])
        self._write([])
        self._log.close()

    def _write(self, rows: list[QueryRow]) -> None:
        """Write a batch, as often as it takes."""
        while True:
            with self._lock:
                unrecorded = self._unrecorded
            if not rows and not unrecorded:
                return
            try:
                self._log.append(rows, dropped=unrecorded)
            except (OSError, ValueError) as error:  # ValueError: the log is of another schema
                if not self._failing:  # once, and not at every try
                    logger.warning("the query log takes no rows: %s", error)
                self._log.close()  # the file may be replaced meanwhile, and is opened anew
                with self._lock:
                    self._failing, self.last_error = True, str(error)
                is_late = self._closing and time.monotonic() + RETRY_S > self._until_s
                if is_late or isinstance(error, ValueError | DatabaseTorn):
                    with self._lock:
                        self._drop(len(rows))
                    return
                time.sleep(RETRY_S)
            else:
                with self._lock:
                    self._failing = False
                    self.written += len(rows)
                    self._unrecorded -= unrecorded
                return

    def _take(self, limit: int) -> list[QueryRow]:
        rows: list[QueryRow] = []
        with suppress(queue.Empty):
            while len(rows) < limit:
                if (row := self._queue.get_nowait()) is not None:
                    rows.append(row)
        return rows

    def _drop(self, num_rows: int) -> None:  # with the lock held
        self.dropped += num_rows
        self._unrecorded += num_rows
