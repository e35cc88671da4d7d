"""Fleets and their rollouts, in the query log's database, which every replica of a fleet reaches.

An event is one transaction that reads the rows, takes the step, and writes what changed. So there is no coordinator
that could be lost: a process that ends between two steps leaves a whole state, and whoever looks next goes on from it.
A row has the lease of the process that looks after it (infra/database.py); a row whose lease ended is lost.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from infra.database import Database, is_held, lease, renewing
from infra.registry import Registry
from infra.rollouts import (
    Cleared,
    DraftCounts,
    Event,
    Fleet,
    Joined,
    Left,
    Loading,
    Lost,
    Named,
    Passed,
    Replica,
    Seen,
    step,
)
from infra.store import StoreUnavailable, translated
from infra.tables import champions, fleets, replicas
from infra.versions import Version, is_quarantined, label
from models.types import RolloutParams

LEASE_S = 60.0
ATTACHED = "attached"  # begins the name of a fleet of attached servers

log = logging.getLogger(__name__)


class RolloutStore:
    """One fleet, `seen` as it was last. Safe to use from several threads; `tell` raises StoreUnavailable."""

    def __init__(self, address: Path | str, fleet: str, params: RolloutParams) -> None:
        self._database, self._fleet, self._params = Database(address), fleet, params
        self._lock, self.seen, self._own = threading.Lock(), Fleet(), tuple[str, ...]()

    @contextmanager
    def taking_part(self, *names: str) -> Iterator[None]:
        """Look after replicas, these and those that join in the block; they leave at its end, or are lost if we are.

        They join, also anew, as soon as the database can be reached.
        """
        self._own = names
        try:
            with renewing(self.renew, LEASE_S):
                yield
        finally:
            with suppress(StoreUnavailable):
                self.tell(Left(names=self._own))

    def tell(self, *events: Event) -> Fleet:
        """Take the step of each event, in order, and return where the fleet stands then."""
        with self._lock, translated("following the rollout"):
            for event in events:
                if isinstance(event, Joined | Left):
                    new = event.names if isinstance(event, Joined) else ()
                    self._own = (*(name for name in self._own if name not in event.names), *new)
            with self._database.reading() as connection:
                before, self.seen = self._stepped(connection, events)
            if before != self.seen:
                with self._database.writing() as connection:
                    before, self.seen = self._stepped(connection, events)
                    self._write(connection, before, self.seen)
                _log(before, self.seen)
            return self.seen

    def renew(self) -> bool:
        """Renew the leases of this process."""
        with self._database.writing() as connection:
            mine = lease(self._database, connection, LEASE_S)
            of_mine = (replicas.c.fleet == self._fleet) & (replicas.c.process == mine["process"])
            connection.execute(update(replicas).where(of_mine).values(lease_until_ms=mine["lease_until_ms"]))
        return True

    def _stepped(self, connection: Connection, events: Iterable[Event]) -> tuple[Fleet, Fleet]:
        found = _rows(connection, self._fleet)
        body = connection.execute(select(fleets.c.body).where(fleets.c.fleet == self._fleet)).scalar_one_or_none()
        kept = Fleet() if body is None else Fleet.model_validate_json(body)
        before = after = kept.model_copy(update={"rows": tuple(Replica.model_validate_json(row.body) for row in found)})
        now_ms = self._database.now_ms(connection)
        lost = tuple(row.name for row in found if not is_held(self._database, connection, row))
        for event in (Lost(names=lost), Joined(names=self._own), *events):
            if not isinstance(event, Named) or event.champion.partition("-")[0] == _champion(connection):
                after = step(after, event, self._params, now_ms)
        return before, after

    def _write(self, connection: Connection, before: Fleet, after: Fleet) -> None:
        of_fleet, was = replicas.c.fleet == self._fleet, {row.name: row for row in before.rows}
        if gone := was.keys() - {row.name for row in after.rows}:
            connection.execute(delete(replicas).where(of_fleet, replicas.c.name.in_(gone)))
        mine = lease(self._database, connection, LEASE_S)
        last = max((row.place for row in _rows(connection, self._fleet)), default=0)
        for at, row in enumerate(after.rows):
            body = row.model_dump_json()
            if row.name not in was:
                values = {"fleet": self._fleet, "name": row.name, "place": last + 1 + at, "body": body, **mine}
                connection.execute(insert(replicas).values(values))
            elif row != was[row.name]:
                values = {"body": body, **(mine if row.name in self._own else {})}
                connection.execute(update(replicas).where(of_fleet, replicas.c.name == row.name).values(values))
        body = after.model_dump_json(exclude={"rows"})
        connection.execute(delete(fleets).where(fleets.c.fleet == self._fleet))
        connection.execute(insert(fleets).values(fleet=self._fleet, body=body))


class Member:
    """A replica's part in its fleet.

    `logged_as` is the name that rows of the query log have for it, `counts` are those of its metrics, where it is
    attached.
    """

    def __init__(self, store: RolloutStore, registry: Registry, name: str, logged_as: str = "") -> None:
        self.store, self.name, self.logged_as = store, name, logged_as
        self.counts: DraftCounts | None = None
        self._registry = registry

    @property
    def leads(self) -> bool:
        """Whether this replica tells what is to be told once for the fleet."""
        return self.store.seen.leader == self.name

    def follow(self, champion: Version | None, seen: Seen | None) -> Version | None:
        """Return what this replica is to serve: the champion, or the last one before it that it may load, if any.

        `seen` is what it says of itself, None while it starts.
        """
        named = Named(champion="" if champion is None else label(champion))
        fleet = self.store.tell(*(() if seen is None else (seen,)), named)
        if champion is not None and (draft := label(champion)) in fleet.refused.keys() - {*fleet.untold}:
            # Asked anew: the champion may have been read before it was quarantined.
            cleared = not is_quarantined(self._registry.get("draft", champion.number))
            self.store.tell(*((Cleared(draft=draft), named) if cleared else ()))
        version, tried = champion, set[int]()
        while version is not None and version.number not in tried and not self._may_load(label(version), seen):
            tried.add(version.number)
            version = self._registry.previous_good(version)
        return None if version is None or version.number in tried else version

    def refused(self, seen: Seen) -> dict[str, str]:
        """Return the drafts that the registry is to be told of, and why; a replica's own fault is none of a draft's."""
        fleet = self.store.tell(seen) if seen.failed else self.store.seen
        return {draft: fleet.refused[draft] for draft in (*fleet.untold, *seen.failed) if draft in fleet.refused}

    def _may_load(self, draft: str, seen: Seen | None) -> bool:
        fleet = self.store.seen
        if not fleet.may_load(self.name, draft):
            return False
        if seen is None or draft != fleet.candidate or draft == seen.version:
            return True
        row = self.store.tell(Loading(name=self.name, draft=draft)).row(self.name)
        return row is not None and row.state == "loading"


def fleets_of(address: Path | str) -> dict[str, Fleet]:
    """Return where all fleets of a database stand that are looked after now."""
    database = Database(address)
    with translated("reading the rollouts"), database.reading() as connection:
        found = {}
        for name, body in connection.execute(select(fleets.c.fleet, fleets.c.body).order_by(fleets.c.fleet)):
            held = (row for row in _rows(connection, name) if is_held(database, connection, row))
            if rows := tuple(Replica.model_validate_json(row.body) for row in held):
                found[name] = Fleet.model_validate_json(body).model_copy(update={"rows": rows})
    return found


def note_tested(address: Path | str, draft: Version, params: RolloutParams) -> None:
    """Tell all fleets that are looked after that a draft passed its post-promotion test."""
    for name, fleet in fleets_of(address).items():
        if fleet.candidate == label(draft):
            RolloutStore(address, name, params).tell(Passed(draft=label(draft)))


def _rows(connection: Connection, fleet: str) -> list[Any]:
    return [*connection.execute(select(replicas).where(replicas.c.fleet == fleet).order_by(replicas.c.place))]


def _log(before: Fleet, after: Fleet) -> None:
    """Say what changed, but for the counts of metrics."""
    stood = {_standing(row) for row in before.rows}
    for row in after.rows:
        if _standing(row) not in stood:
            log.info("%s, wave %d: %s, draft %s", *_standing(row))
    for draft, why in after.refused.items() - before.refused.items():
        log.warning("draft %s is refused for all replicas: %s", draft, why)
    if after.told() and after.told() != before.told():
        log.info("%s", after.told())


def _standing(row: Replica) -> tuple[str, int, str, str]:
    return row.name, row.wave, row.state, row.version or "unknown"


def _champion(connection: Connection) -> str:
    """Return the champion's number: a replica may say late what it read before another champion came."""
    number = connection.execute(select(champions.c.version).where(champions.c.kind == "draft")).scalar_one_or_none()
    return "" if number is None else str(number)
