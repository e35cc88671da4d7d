"""Which version of a kind is served: a row decides, and MLflow's alias is its copy, for people to look at.

MLflow can't compare and swap. So the row, in the query log's database, changes first, by an update that names the
version that it replaces; a crash leaves either champion in place. Alias `champion` and the tag `previous` are written
from it; what a crash left uncopied is copied by whoever looks next. `copied` says whether the alias was written since:
until then an alias that differs is an older copy, and from then on somebody moved it by hand. That is a request: it
becomes the row if the version may serve, else it is put back.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import Connection, insert, select, update

from infra.database import Database, DatabaseUnavailable
from infra.events import ALIAS_PUT_BACK, REGISTRY_RESOURCE, Emitter
from infra.store import NotFound, Store, StoreUnavailable, translated
from infra.tables import champions
from infra.versions import FIRST
from models.types import Frozen, Kind

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"

log = logging.getLogger(__name__)


class Outdated(ValueError):
    """The champion that a version was gated against is no longer the one to beat."""


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


class ChampionRows:
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

    def replace(self, kind: Kind, expected: int | None, version: int | None, previous: int | None) -> Champion | None:
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


class Champions:
    """The rows and their copies in an MLflow store, kept alike."""

    def __init__(
        self, database: Database, store: Store, model: Callable[[Kind], str], refusal: Callable[["ModelVersion"], str]
    ) -> None:
        """Take the model's name of a kind, and what says why a version that people chose can't be served, or ""."""
        self._rows, self._store, self._model, self._refusal = ChampionRows(database), store, model, refusal
        self._threads, self._depth = threading.RLock(), 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else with this database promotes or quarantines, and keep them from it in the block.

        Hold it around a decision and what follows from it; it may be taken again inside. Whoever loses it meanwhile, as
        with a connection, still can't replace another champion than the one that it saw.
        """
        with self._threads, ExitStack() as held:
            if not self._depth:
                held.enter_context(self._rows.alone())
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def version(self, kind: Kind) -> "ModelVersion | None":
        """Return MLflow's version that is to be served, None before the first."""
        row, alias = self._rows.row(kind), self._alias(kind)
        if row is None and alias is None:
            return None
        if row is None or not row.copied or row.version != _number(alias):
            number = self.settle(kind).version
            return None if number is None else self._store.version(self._model(kind), number)
        return alias

    def settle(self, kind: Kind) -> Champion:
        """Bring row and alias together, and return the row; where there is none it begins with what the alias names."""
        with self.alone():
            row, alias = self._rows.row(kind), self._alias(kind)
            number = _number(alias)
            if row is None:
                return self._rows.adopt(kind, number)
            if not row.copied:
                return self._copy(kind, row)
            if row.version == number:
                return row
            if why := "the alias was removed" if alias is None else self._refusal(alias):
                _tell_put_back(kind, row, why)
                return self._copy(kind, row)
            log.info("%s %s is the champion, because alias %s was moved to it in MLflow", kind, number, CHAMPION)
            return self.move(kind, row, number, row.version)

    def move(self, kind: Kind, row: Champion, number: int | None, previous: int | None) -> Champion:
        """Replace the champion of a row; Outdated where somebody else did it meanwhile."""
        if (moved := self._rows.replace(kind, row.version, number, previous)) is None:
            raise Outdated(f"{kind} {row.version} is no longer the champion: another process replaced it just now")
        return self._copy(kind, moved)

    def _copy(self, kind: Kind, row: Champion) -> Champion:
        """Write in MLflow what a row says, and return it; where somebody deleted the version there is none any more."""
        name, number, client = self._model(kind), row.version, self._store.client
        try:
            with translated(f"making {kind} {number} the champion in MLflow"):
                if number is None:
                    client.delete_registered_model_alias(name, CHAMPION)
                else:
                    if not row.copied:
                        former = FIRST if row.previous is None else str(row.previous)
                        client.set_model_version_tag(name, str(number), "previous", former)
                    client.set_registered_model_alias(name, CHAMPION, str(number))
        except NotFound:
            if number is not None:
                log.warning("%s %s, the champion, is gone from MLflow: there is none now", kind, number)
                return self.move(kind, row, None, None)
        self._rows.note_copied(kind, number)
        return row

    def _alias(self, kind: Kind) -> "ModelVersion | None":
        try:
            with translated(f"looking up the champion of {kind}"):
                return self._store.client.get_model_version_by_alias(self._model(kind), CHAMPION)
        except NotFound:
            return None


def _number(alias: "ModelVersion | None") -> int | None:
    return None if alias is None else int(alias.version)


def _tell_put_back(kind: Kind, row: Champion, why: str) -> None:
    told = f"alias {CHAMPION} of {kind}, moved in MLflow, is put back to {row.version or 'none'}: {why}"
    log.warning("%s", told)
    if orchestrator := os.environ.get("PREFECT_API_URL"):
        events = Emitter(orchestrator)
        events.emit(ALIAS_PUT_BACK, kind, {"text": told}, REGISTRY_RESOURCE)
        events.close()
