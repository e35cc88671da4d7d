"""Flow `promote`: somebody decides which draft is served. The running service follows the alias by itself."""

from prefect import flow

from infra.registry import Version
from tasks.promote import promote_version, roll_back


@flow(name="promote")
def promote(number: int, forced: str = "") -> Version:
    """Make a draft the champion that a gate passed, or with a reason another one."""
    return promote_version(number, forced)


@flow(name="rollback")
def rollback(quarantine: str = "") -> Version:
    """Go back to the champion before this one; with a reason this one is never served again."""
    return roll_back(quarantine)
