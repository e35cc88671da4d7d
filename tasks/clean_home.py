"""Complete erasures; remove old drafts, results of finished steps, caches, work, copies and logs."""

from contextlib import suppress

from infra.clean import Item, clean_up
from infra.erase import finish_erasures
from infra.settings import load_settings
from models.recipe import Keep
from tasks.stages.reporting import run_logger
from tasks.stages.task import task


@task
def clean_home(keep: Keep, pool: int, dry_run: bool = False) -> list[tuple[Item, str]]:
    """Remove what is beyond the limits, or only find it; see `infra.clean`. Erasures that were killed come first."""
    settings = load_settings()
    with suppress(TimeoutError, ConnectionError):  # the next night completes them
        if not dry_run:
            finish_erasures(settings)
    going = clean_up(settings, keep, pool, dry_run)
    run_logger().info("%d parts of the home go, %d MiB", len(going), sum(one.num_bytes for one, _ in going) >> 20)
    return going
