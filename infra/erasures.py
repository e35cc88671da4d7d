"""Erasures of a log: which rows are to go, how far that has come, and which snapshots they were read into.

The rows of an erasure leave the log at once, in one transaction with its entry in the journal. Their bodies stay, which
no reader of the log finds without its row, because it takes knowing a text to find it again in files; they are the last
to go (`infra.erase`). What was found is written to the journal after each step, so that an erasure that was killed is
completed by the next one.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from pydantic import Field
from sqlalchemy import Connection, Select, delete, func, insert, literal, select, union_all, update

from infra import tables
from infra.consent import QueryRow
from infra.database import DAY_MS, Database, days, drop_day, in_chunks
from infra.windows import Window, shrink_claim
from models.types import Frozen

ERASED = "the error was erased with rows of the window"
DONE = -1
ROW, ERASING, READ, ATTEMPT = tables.rows.c, tables.erasing.c, tables.reads.c, tables.attempts.c
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
    def __init__(self, database: Database) -> None:
        self._database = database

    def record_reads(self, snapshot: str, ids_of_role: Mapping[Role, Iterable[str]]) -> None:
        """Record which rows go into a snapshot, and as what; ids that are no row's are left out."""
        known = union_all(select(ROW.seq, ROW.id), select(ERASING.seq, ERASING.id)).subquery().c
        recorded = select(READ.seq).where(READ.snapshot == snapshot)
        with self._database.writing() as connection:
            for role, ids in ids_of_role.items():
                there = {*connection.scalars(recorded.where(READ.role == role))}
                for chunk in in_chunks(ids):
                    seqs = {*connection.scalars(select(known.seq).where(known.id.in_(chunk)))} - there
                    there |= seqs
                    if new := [{"seq": seq, "snapshot": snapshot, "role": role} for seq in sorted(seqs)]:
                        connection.execute(insert(tables.reads), new)

    def reads_of(self, seqs: Iterable[int]) -> dict[str, Counter[str]]:
        """Return snapshot to what it read of some rows, role to number."""
        counts = select(READ.snapshot, READ.role, func.count()).group_by(READ.snapshot, READ.role)
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        with self._database.reading() as connection:
            for chunk in in_chunks(seqs):
                for snapshot, role, number in connection.execute(counts.where(READ.seq.in_(chunk))):
                    found[snapshot][role] += number
        return dict(found)

    def begin(self, subjects: tuple[str, ...] = (), older_than_ms: int | None = None) -> Certificate:
        """Take rows out of the log and enter their erasure in the journal, in one transaction; of none it is complete.

        They are those of the subjects' hashes, as aliases too, or, if given, those served before a Unix time.
        """
        named = select(tables.aliases.c.seq).where(tables.aliases.c.alias.in_(subjects))
        by_subject = ROW.subject.in_(subjects) | ROW.seq.in_(named)
        condition = by_subject if older_than_ms is None else ROW.time_ms < older_than_ms
        begun = Certificate(subjects=subjects, older_than_ms=older_than_ms, began_ms=0)
        with self._database.writing() as connection:
            number = 1 + _last(connection)
            begun = begun.with_(number=number, began_ms=self._database.now_ms(connection))
            connection.execute(insert(tables.erasures), {"number": number, "step": 0, "certificate": ""})
            found = select(ROW.seq, literal(number), ROW.id, ROW.time_ms, ROW.consent).where(condition)
            columns = ["seq", "erasure", "id", "time_ms", "consent"]
            connection.execute(insert(tables.erasing).from_select(columns, found))
            certificate = _counted(connection, begun)
            inside = ERASING.seq.between(ATTEMPT.first_seq, ATTEMPT.last_seq) & (ERASING.erasure == number)
            quoting = (ATTEMPT.error != tables.ENDED) & select(ERASING.seq).where(inside).exists()
            connection.execute(update(tables.attempts).where(quoting).values(error=ERASED))
            connection.execute(delete(tables.rows).where(ROW.seq.in_(_seqs(number))))
            shrink_claim(connection)
            _enter(connection, certificate, 0 if certificate.rows else DONE)
        return certificate

    def last(self) -> int:
        """Return the number of the last erasure, 0 before the first."""
        with self._database.reading() as connection:
            return _last(connection)

    def certificates(self) -> list[Certificate]:
        """Return what is known of each erasure, complete or not, oldest first."""
        return [certificate for _, certificate in self._journal()]

    def unfinished(self) -> list[tuple[int, Certificate]]:
        """Return the next step and the certificate so far of each erasure that is not complete, oldest first."""
        return [(step, certificate) for step, certificate in self._journal() if step >= 0]

    def rows(self, number: int) -> list[QueryRow]:
        body = (ERASING.seq == tables.bodies.c.seq) & (ERASING.time_ms == tables.bodies.c.time_ms)
        found = select(ERASING.seq, tables.bodies.c.body).join_from(tables.erasing, tables.bodies, body)
        with self._database.reading() as connection:
            mine = connection.execute(found.where(ERASING.erasure == number).order_by(ERASING.seq))
            return [QueryRow.of_body(seq, body) for seq, body in mine]

    def redact_errors(self, clean: Callable[[str], tuple[str, int]]) -> int:
        """Overwrite places of attempts' errors as `clean` says, and return how many those were."""
        total = 0
        with self._database.writing() as connection:
            for error in connection.scalars(select(ATTEMPT.error).distinct()).all():
                changed, num_places = clean(error)
                if num_places:
                    connection.execute(update(tables.attempts).where(ATTEMPT.error == error).values(error=changed))
                    total += num_places
        return total

    def enter(self, certificate: Certificate, step: int) -> None:
        """Write what an erasure has done so far to the journal, and which step is the next; DONE if none is."""
        with self._database.writing() as connection:
            _enter(connection, certificate, step)

    def forget(self, number: int) -> None:
        """Delete the text of an erasure's rows; may be repeated.

        On Postgres a day that nothing else is of is dropped, and what is left of others is written anew. SQLite's
        write-ahead log is emptied unless a reader prevents it.
        """
        with self._database.writing() as connection:
            if self._database.is_shared:
                left = [day for day in days(connection) if _erase_day(connection, day, number)]
            else:
                connection.execute(delete(tables.bodies).where(tables.bodies.c.seq.in_(_seqs(number))))
        if self._database.is_shared:
            self._database.vacuum(left)
        with self._database.writing() as connection:
            connection.execute(delete(tables.erasing).where(ERASING.erasure == number))
        self._database.empty_wal()

    def _journal(self) -> list[tuple[int, Certificate]]:
        journal = tables.erasures.c
        with self._database.reading() as connection:
            found = connection.execute(select(journal.step, journal.certificate).order_by(journal.number)).all()
        return [(step, Certificate.model_validate_json(certificate)) for step, certificate in found]


def _enter(connection: Connection, certificate: Certificate, step: int) -> None:
    this = update(tables.erasures).where(tables.erasures.c.number == certificate.number)
    connection.execute(this.values(step=step, certificate=certificate.model_dump_json()))


def _last(connection: Connection) -> int:
    return int(connection.execute(select(func.coalesce(func.max(tables.erasures.c.number), 0))).scalar_one())


def _seqs(number: int) -> Select[tuple[int]]:
    return select(ERASING.seq).where(ERASING.erasure == number)


def _erase_day(connection: Connection, day: int, number: int) -> bool:
    """Delete an erasure's text of a day, or drop a day of which nothing is left; returns whether there was any left."""
    bodies, mine = tables.bodies.c, _seqs(number)
    first_ms, last_ms = day * DAY_MS, (day + 1) * DAY_MS - 1
    if connection.execute(mine.where(ERASING.time_ms.between(first_ms, last_ms)).limit(1)).first() is None:
        return False
    of_day = bodies.time_ms.between(first_ms, last_ms)
    if connection.execute(select(bodies.seq).where(of_day, bodies.seq.not_in(mine)).limit(1)).first() is None:
        drop_day(connection, day)
        return False
    connection.execute(delete(tables.bodies).where(of_day, bodies.seq.in_(mine)))
    return True


def _counted(connection: Connection, certificate: Certificate) -> Certificate:
    """Add what the rows of an erasure are part of, before they leave the log."""
    mine, sketches, members = _seqs(certificate.number), tables.sketches, tables.regression_sets
    rows = connection.execute(select(func.count()).select_from(mine.subquery())).scalar_one()
    sketched = select(func.count()).select_from(sketches).where(sketches.c.seq.in_(mine))
    held = select(ROW.domain, func.count()).join_from(members, tables.rows).where(ROW.seq.in_(mine))
    fields = Window.model_fields
    windows = (
        union_all(
            *(
                select(*(table.c[name] for name in fields))
                for table in (tables.committed, tables.set_aside, tables.claim)
            )
        )
        .subquery()
        .c
    )
    inside = ERASING.seq.between(windows.first_seq, windows.last_seq) & (ERASING.consent == "full")
    claimed = select(*windows).where(select(ERASING.seq).where(inside, ERASING.erasure == certificate.number).exists())
    return certificate.with_(
        rows=rows,
        sketches=connection.execute(sketched).scalar_one(),
        regression_rows=dict(connection.execute(held.group_by(ROW.domain)).tuples().all()),
        windows=tuple(Window(**one) for one in connection.execute(claimed.order_by(windows.first_seq)).mappings()),
    )
