"""Fleets of replicas: which of them may load which draft."""

from alembic import op
from sqlalchemy import BigInteger, Column, Integer, Text

revision, down_revision = "9", "8"


def upgrade() -> None:
    number = BigInteger().with_variant(Integer, "sqlite")
    op.create_table("fleets", Column("fleet", Text, primary_key=True), Column("body", Text, nullable=False))
    op.create_table(
        "replicas",
        Column("fleet", Text, primary_key=True),
        Column("name", Text, primary_key=True),
        Column("place", number, nullable=False),
        Column("body", Text, nullable=False),
        Column("pid", number, nullable=False),
        Column("process", Text, nullable=False),
        Column("lease_until_ms", number, nullable=False),
    )
