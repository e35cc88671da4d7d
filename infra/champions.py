"""Which version of each kind is to be served: a row in the query log's database, which decides.

MLflow can't compare and swap. So the row changes first, by an update that names the version that it replaces, and
MLflow's alias is its copy, for people to look at. `copied` says whether the alias was written since: until then an
alias that differs is an older copy, and from then on somebody moved it by hand.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, insert, select, update

from infra.database import Database, DatabaseUnavailable
from infra.store import StoreUnavailable, translated
from infra.tables import champions
from infra.versions import Kind
from models.types import Frozen


class Champion(Frozen):
    """The row of a kind.

    Attributes:
        version: what is to be served, None if there is nothing good.
        previous: the champion that the version replaced, if any, when it was promoted.
        copied: whether MLflow's alias was written for the version.
        changed_ms, changed_by: when the version changed, by the database's clock, and by which process.
    """

    version: int | None
    previous: int | None
    copied: bool
    changed_ms: int
    changed_by: str


class Champions:
    """The rows; every call raises StoreUnavailable where the database is out of reach."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock of whoever changes what is served, in any home that has this database."""
        try:
            with self._database.lock("champions"):
                yield
        except DatabaseUnavailable as error:
            raise StoreUnavailable(f"holding the lock of the champions: {error}") from error

    def row(self, kind: Kind) -> Champion | None:
        with translated(f"looking up the champion of {kind}"), self._database.reading() as connection:
            return _row(connection, kind)

    def adopt(self, kind: Kind, version: int | None) -> Champion:
        """Begin the row of a kind with what MLflow's alias names, unless there is one, and return it."""
        with translated(f"beginning the champion of {kind}"), self._database.writing() as connection:
            if (row := _row(connection, kind)) is None:
                row = self._changed(connection, version, None, copied=True)
                connection.execute(insert(champions).values(kind=kind, **row.model_dump()))
            return row

    def swap(self, kind: Kind, expected: int | None, version: int | None, previous: int | None) -> Champion | None:
        """Replace the expected version by another one, and return the row; None where it is no longer there."""
        of_kind, is_expected = champions.c.kind == kind, champions.c.version.is_not_distinct_from(expected)
        with translated(f"changing the champion of {kind}"), self._database.writing() as connection:
            row = self._changed(connection, version, previous, copied=False)
            changed = update(champions).where(of_kind, is_expected).values(row.model_dump())
            return row if connection.execute(changed).rowcount else None

    def note_copied(self, kind: Kind, version: int | None) -> None:
        """Note that the alias was written for the version, if it is still the one to be served."""
        is_same = champions.c.version.is_not_distinct_from(version)
        with translated(f"noting the champion of {kind}"), self._database.writing() as connection:
            connection.execute(update(champions).where(champions.c.kind == kind, is_same).values(copied=True))

    def _changed(self, connection: Connection, version: int | None, previous: int | None, copied: bool) -> Champion:
        return Champion(
            version=version,
            previous=previous,
            copied=copied,
            changed_ms=self._database.now_ms(connection),
            changed_by=f"{socket.gethostname()} {os.getpid()}",
        )


def _row(connection: Connection, kind: Kind) -> Champion | None:
    row = connection.execute(select(champions).where(champions.c.kind == kind)).mappings().one_or_none()
    return None if row is None else Champion.model_validate({name: row[name] for name in Champion.model_fields})
