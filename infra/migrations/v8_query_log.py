"""The query log on SQLAlchemy: the oldest schema that can be brought up to date."""

revision, down_revision = "8", None


def upgrade() -> None:
    """Nothing is older."""
