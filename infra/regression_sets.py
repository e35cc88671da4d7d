"""Regression sets: conversations of each domain that nothing is trained on, so that drafts are held to them for long.

They are rows of the log, named by `seq`: erased rows leave their set, and no text is kept twice. A set grows to 100
conversations, each of another cluster; of the rows of a window that could be trained on, at most a quarter goes there.
When it is full it is renewed slowly, by two conversations a window, so that half of it is new after 25 windows of its
domain. One that heard nothing of its domain for 30 days is given up.

A set's conversations are drawn by a keyed hash, the API keys in turn: one key fills it alone only while nobody else
asks. What is alike to a member is not trained on either, and nobody may stop the training with that: a member whose
cluster has grown above 5% of its domain leaves the set, and so do the largest ones while more than a quarter of the
domain's rows is merely alike to members.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from sqlalchemy import delete, func, insert, select

from infra import tables
from infra.database import STREAMED, Database, in_chunks

SIZE, SHARE, MAX_CLUSTER_SHARE = 100, 0.25, 0.05
FEWEST = 20  # conversations: with fewer, a domain is scored inside of OTHER
OTHER = "other"
RENEWED = 2
SILENT_MS = 30 * 24 * 3600 * 1000
MIN_CLUSTER = 5  # rows that a cluster may have however small its domain is
NUM_LATEST = 100  # rows that say what time it is
ROW, SKETCH, MEMBER = tables.rows.c, tables.sketches.c, tables.regression_sets.c


class SketchedRow(NamedTuple):
    """A row of full consent, and its sketch as `models.core.evaluation.clusters` made it."""

    seq: int
    domain: str
    group: str | None
    key: str | None
    time_ms: int
    turn: bytes
    grams: bytes


class Sketches:
    """Sketches of a log's rows, by which conversations are clustered: made once for each row, and erased with it.

    They are hashes under the home's secret; those under another one count as missing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def missing(self, secret: bytes) -> list[tuple[int, list[int]]]:
        """Return seq and prompt tokens of each row with full consent and tokens that has no sketch, by seq."""
        made = select(SKETCH.seq).where(SKETCH.secret == _name_of(secret))
        wanted = (ROW.consent == "full") & ROW.context.is_not(None) & ROW.seq.not_in(made)
        found = select(ROW.seq, tables.bodies.c.body).select_from(tables.WITH_BODY).where(wanted).order_by(ROW.seq)
        with self._database.reading() as connection:
            bodies = connection.execute(found.execution_options(yield_per=STREAMED))
            return [(seq, json.loads(body)["prompt_ids"]) for seq, body in bodies]

    def keep(self, secret: bytes, made: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Keep seq, turn and grams of each; what was erased meanwhile is left out."""
        with self._database.writing() as connection:
            for chunk in in_chunks(made):
                seqs = [seq for seq, *_ in chunk]
                there = {*connection.scalars(select(ROW.seq).where(ROW.seq.in_(seqs)))}
                connection.execute(delete(tables.sketches).where(SKETCH.seq.in_(seqs)))
                if kept := [
                    {"seq": seq, "secret": _name_of(secret), "turn": turn, "grams": grams}
                    for seq, turn, grams in chunk
                    if seq in there
                ]:
                    connection.execute(insert(tables.sketches), kept)

    def read(self, secret: bytes) -> list[SketchedRow]:
        columns = (ROW.seq, ROW.domain, ROW.group_hash, ROW.key, ROW.time_ms, SKETCH.turn, SKETCH.grams)
        found = select(*columns).join_from(tables.sketches, tables.rows).where(SKETCH.secret == _name_of(secret))
        with self._database.reading() as connection:
            return [SketchedRow(*row) for row in connection.execute(found.order_by(ROW.seq))]


class Conversation(NamedTuple):
    """A row that was clustered: by its wording (`alike`), and with what clients say belongs together (`cluster`)."""

    seq: int
    domain: str
    key: str | None
    time_ms: int
    cluster: str
    alike: str


class RegressionSet(NamedTuple):
    size: int
    newest_ms: int


class Change(NamedTuple):
    """What a window does to the regression sets: rows that come in, and rows that leave."""

    reserved: list[int]
    released: list[int]


class RegressionSets:
    def __init__(self, database: Database) -> None:
        self._database = database

    def members(self) -> list[int]:
        with self._database.reading() as connection:
            return [*connection.scalars(select(MEMBER.seq).order_by(MEMBER.seq))]

    def by_domain(self) -> dict[str, RegressionSet]:
        sizes = select(ROW.domain, func.count(), func.max(ROW.time_ms)).join_from(tables.regression_sets, tables.rows)
        with self._database.reading() as connection:
            found = connection.execute(sizes.group_by(ROW.domain).order_by(ROW.domain))
            return {domain: RegressionSet(*sized) for domain, *sized in found}

    def apply(self, change: Change) -> None:
        """Write a change in one transaction; rows that were erased meanwhile are left out."""
        members = select(MEMBER.seq)
        with self._database.writing() as connection:
            for chunk in in_chunks(change.released):
                connection.execute(delete(tables.regression_sets).where(MEMBER.seq.in_(chunk)))
            for chunk in in_chunks(change.reserved):
                new = select(ROW.seq).where(ROW.seq.in_(chunk), ROW.consent == "full", ROW.seq.not_in(members))
                connection.execute(insert(tables.regression_sets).from_select(["seq"], new))


def scored_as(domains: Iterable[str]) -> dict[str, str]:
    """Return each domain to what it is scored as, itself or OTHER, from the domains of all members."""
    return {domain: domain if size >= FEWEST else OTHER for domain, size in Counter(domains).items()}


def plan(
    rows: Sequence[Conversation],
    members: Collection[int],
    first_seq: int,
    usable: Collection[int],
    trained: Collection[str],
    draw: Callable[[str], bytes],
) -> Change:
    """Decide what a window reserves and releases. Once it has reserved something it does nothing more.

    `rows` are the log's, up to the window's last one, by seq; `usable` are seqs of the window's rows that could be
    scored, `trained` clusters that something was trained on outside of the log; `draw` gives a cluster's keyed hash,
    whose order is that of the draw.
    """
    inside = [row for row in rows if row.seq in members]
    released = _silent(rows, inside) | _outgrown(rows, inside)
    kept = [row for row in inside if row.seq not in released]
    if any(row.seq >= first_seq for row in inside):
        return Change([], sorted(released))
    sizes = Counter(row.domain for row in rows)
    in_cluster = Counter((row.domain, row.cluster) for row in rows)
    taken = {row.cluster for row in kept} | set(trained) | {row.cluster for row in rows if row.seq < first_seq}

    def name_of(domain: str) -> str:
        return domain if sizes[domain] * SHARE >= FEWEST else OTHER

    free: dict[str, list[Conversation]] = defaultdict(list)
    for row in rows:
        within = in_cluster[row.domain, row.cluster] <= max(1, MAX_CLUSTER_SHARE * sizes[row.domain])
        if row.seq in usable and row.cluster not in taken and within:
            free[name_of(row.domain)].append(row)
            taken.add(row.cluster)
    # Of what could be trained on: a key that asks for more than its share brings rows that never are.
    of_window = Counter(name_of(row.domain) for row in rows if row.seq in usable)
    cost = Counter(row.cluster for row in rows if row.seq in usable)
    reserved: list[int] = []
    for name, candidates in sorted(free.items()):
        own = [row for row in kept if name_of(row.domain) == name]
        drawn = _draw(candidates, own, SIZE - len(own) or RENEWED, int(SHARE * of_window[name]), cost, draw)
        reserved += drawn
        released |= _longest_served(own, max(0, len(own) + len(drawn) - SIZE))
    return Change(sorted(reserved), sorted(released))


def _draw(
    candidates: Sequence[Conversation],
    own: Sequence[Conversation],
    wanted: int,
    quota: int,
    cost: Mapping[str, int],
    draw: Callable[[str], bytes],
) -> list[int]:
    """Draw up to `wanted` conversations, from the key that has the fewest each time, for at most `quota` rows."""
    waiting: dict[str | None, list[Conversation]] = defaultdict(list)
    for row in sorted(candidates, key=lambda row: draw(row.cluster), reverse=True):
        waiting[row.key].append(row)
    had = Counter(row.key for row in own)
    drawn: list[int] = []
    while len(drawn) < wanted and waiting:
        key = min(waiting, key=lambda key: (had[key], draw(key or "")))
        row = waiting[key].pop()
        if not waiting[key]:
            del waiting[key]
        if cost[row.cluster] <= quota:
            quota -= cost[row.cluster]
            had[key] += 1
            drawn.append(row.seq)
    return drawn


def _longest_served(own: Sequence[Conversation], number: int) -> set[int]:
    """Return the members that leave a full set: the oldest of the key that has the most, each time."""
    of_key: dict[str | None, list[int]] = defaultdict(list)
    for row in sorted(own, reverse=True):
        of_key[row.key].append(row.seq)
    return {max(of_key.values(), key=len).pop() for _ in range(number)}


def _silent(rows: Sequence[Conversation], inside: Sequence[Conversation]) -> set[int]:
    heard: dict[str, int] = {}
    for row in rows:
        heard[row.domain] = max(row.time_ms, heard.get(row.domain, row.time_ms))
    latest = rows[-NUM_LATEST:]
    now = median(row.time_ms for row in latest) if latest else 0  # a clock that jumped for a row gives nothing up
    return {row.seq for row in inside if now - heard[row.domain] > SILENT_MS}


def _outgrown(rows: Sequence[Conversation], inside: Sequence[Conversation]) -> set[int]:
    """Return the members whose clusters keep too much of their domain from being trained on."""
    of_cluster = defaultdict(list)
    for row in inside:
        of_cluster[row.domain, row.cluster].append(row.seq)
    sizes, alike = Counter(row.domain for row in rows), Counter((row.domain, row.cluster) for row in rows)
    merely: Counter[str] = Counter()
    for (domain, cluster), seqs in of_cluster.items():
        merely[domain] += alike[domain, cluster] - len(seqs)
    released: set[int] = set()
    for domain, cluster in sorted(of_cluster, key=lambda each: -alike[each]):
        number, seqs = alike[domain, cluster], of_cluster[domain, cluster]
        too_large = number > max(MIN_CLUSTER, MAX_CLUSTER_SHARE * sizes[domain])
        if too_large or merely[domain] > SHARE * sizes[domain]:
            merely[domain] -= number - len(seqs)
            released.update(seqs)
    return released


def _name_of(secret: bytes) -> str:
    return hashlib.sha256(b"sketches" + secret).hexdigest()[:16]
