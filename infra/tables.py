"""The tables of a home's database, the same on SQLite and Postgres; `infra.database` makes and migrates them.

A change of a table raises SCHEMA_VERSION and gets a step in `infra.migrations`.

What statements ask for is in columns of `rows`; the whole row, with its text, is one JSON text in `bodies`. On Postgres
that table has a partition for each day of `time_ms`, so that a day's text can be dropped at once; the narrow `rows` has
none, and so an id and a `seq` are unique whatever their day.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)  # fmt: skip

SCHEMA_VERSION = 9
ENDED = "the process ended before it said why"
# `cursor` is the last row of the last window that ended, `seq` the number of the last row that was written.
COUNTERS = ("cursor", "dropped", "duplicates", "seq")
METADATA = MetaData()
Number = BigInteger().with_variant(Integer, "sqlite")  # there any integer has 64 bits, and a key of this type no index


def _of_row() -> Column[int]:
    """A column of rows' numbers, whose entries leave with their row."""
    return Column("seq", Number, ForeignKey("rows.seq", ondelete="CASCADE"), primary_key=True)


def _window() -> tuple[Column[int], Column[int], Column[int], Column[str], Column[str]]:
    return (
        Column("first_seq", Number, primary_key=True, autoincrement=False),
        Column("last_seq", Number, primary_key=True, autoincrement=False),
        Column("num_rows", Number, nullable=False),
        Column("sha256", Text, nullable=False),
        Column("owner", Text, nullable=False),
    )


alembic_version = Table("alembic_version", METADATA, Column("version_num", String(32), primary_key=True))  # alembic's
counters = Table("counters", METADATA, Column("name", Text, primary_key=True), Column("value", Number, nullable=False))

rows = Table(
    "rows",
    METADATA,
    Column("seq", Number, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False, unique=True),
    Column("time_ms", Number, nullable=False, index=True),
    Column("subject", Text, index=True),
    Column("domain", Text, nullable=False),
    Column("consent", Text, nullable=False),
    Column("key", Text),
    Column("group_hash", Text),
    Column("server", Text),
    Column("draft_version", Number),
    Column("drafting", Text, nullable=False),
    Column("structured", Boolean, nullable=False),
    Column("context", Number),  # tokens of the prompt; NULL where its tokens are not kept
    Column("steps", Number, nullable=False),
    Column("drafted", Number, nullable=False),
    Column("accepted", Number, nullable=False),
)
Index("rows_by_domain", rows.c.domain, rows.c.consent, rows.c.seq)
Index("rows_by_draft", rows.c.draft_version, rows.c.seq)
bodies = Table(
    "bodies",
    METADATA,
    Column("seq", Number, primary_key=True, autoincrement=False),
    Column("time_ms", Number, primary_key=True, autoincrement=False),
    Column("body", Text, nullable=False),
    postgresql_partition_by="RANGE (time_ms)",
)
WITH_BODY = rows.join(bodies, (rows.c.seq == bodies.c.seq) & (rows.c.time_ms == bodies.c.time_ms))
aliases = Table("aliases", METADATA, _of_row(), Column("alias", Text, primary_key=True, index=True))
sketches = Table(
    "sketches",
    METADATA,
    _of_row(),
    Column("secret", Text, nullable=False),
    Column("turn", LargeBinary, nullable=False),
    Column("grams", LargeBinary, nullable=False),
)
regression_sets = Table("regression_sets", METADATA, _of_row())

claim = Table(
    "claim",
    METADATA,
    Column("one", Integer, CheckConstraint("one = 1"), unique=True, nullable=False, default=1),
    *_window(),
    Column("pid", Number, nullable=False),
    Column("process", Text, nullable=False),
    Column("lease_until_ms", Number, nullable=False),
)
committed = Table("committed", METADATA, *_window())
set_aside = Table("set_aside", METADATA, *_window(), Column("time_ms", Number, nullable=False))
attempts = Table(
    "attempts",
    METADATA,
    Column("first_seq", Number, primary_key=True, autoincrement=False),
    Column("last_seq", Number, primary_key=True, autoincrement=False),
    Column("number", Number, primary_key=True, autoincrement=False),
    Column("error", Text, nullable=False, default=ENDED),
)

reads = Table(
    "reads",
    METADATA,
    Column("seq", Number, primary_key=True, autoincrement=False),
    Column("snapshot", Text, primary_key=True),
    Column("role", Text, primary_key=True),
)
erasures = Table(
    "erasures",
    METADATA,
    Column("number", Number, primary_key=True, autoincrement=False),
    Column("step", Number, nullable=False),
    Column("certificate", Text, nullable=False),
)
# Rows whose text, in `bodies`, stays until it was looked for elsewhere.
erasing = Table(
    "erasing",
    METADATA,
    Column("seq", Number, primary_key=True, autoincrement=False),
    Column("erasure", Number, ForeignKey("erasures.number"), nullable=False, index=True),
    Column("id", Text, nullable=False),
    Column("time_ms", Number, nullable=False),
    Column("consent", Text, nullable=False),
)

champions = Table(
    "champions",
    METADATA,
    Column("kind", Text, primary_key=True),
    Column("version", Number),
    Column("previous", Number),
    Column("copied", Boolean, nullable=False),
    Column("changed_ms", Number, nullable=False),
    Column("changed_by", Text, nullable=False),
)

# Rollouts of champions (infra/rollouts.py), and the replicas of each fleet with the lease of who looks after them.
fleets = Table("fleets", METADATA, Column("fleet", Text, primary_key=True), Column("body", Text, nullable=False))
replicas = Table(
    "replicas",
    METADATA,
    Column("fleet", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("place", Number, nullable=False),
    Column("body", Text, nullable=False),
    Column("pid", Number, nullable=False),
    Column("process", Text, nullable=False),
    Column("lease_until_ms", Number, nullable=False),
)

trigger_domains = Table(
    "trigger_domains", METADATA, Column("domain", Text, primary_key=True), Column("state", Text, nullable=False)
)
trigger_facts = Table(
    "trigger_facts", METADATA, Column("name", Text, primary_key=True), Column("body", Text, nullable=False)
)
trigger_run = Table(
    "trigger_run",
    METADATA,
    Column("one", Integer, CheckConstraint("one = 1"), primary_key=True, default=1),
    Column("pid", Number, nullable=False),
    Column("process", Text, nullable=False),
    Column("lease_until_ms", Number, nullable=False),
)
# What is said of a home, and not of rows.
OF_HOME = (champions, fleets, replicas, trigger_domains, trigger_facts, trigger_run)
