"""Complete erasures; remove old drafts, results of finished steps, caches, work, copies, logs, and rows by age."""

from contextlib import suppress

from infra.clean import Item, clean_up
from infra.erase import erase_older_than, finish_erasures
from infra.erasures import Certificate
from infra.settings import load_settings
from models.recipe import Keep
from tasks.stages import run_logger, task


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


@task
def retain_rows(days: float) -> Certificate:
    """Erase rows that were served more than `days` days ago, and what was made of them; see `infra.erase`."""
    certificate = erase_older_than(load_settings(), days)
    told = "erased %d rows that were older than %g days, and %d snapshots were rewritten"
    run_logger().info(told, certificate.rows, days, len(certificate.snapshots))
    return certificate
