"""Erase what was served longer ago than it may be kept."""

from infra.erase import erase_older_than
from infra.erasures import Certificate
from infra.settings import load_settings
from tasks.stages.reporting import run_logger
from tasks.stages.task import task


@task
def retain_rows(days: float) -> Certificate:
    """Erase rows that were served more than `days` days ago, and what was made of them; see `infra.erase`."""
    certificate = erase_older_than(load_settings(), days)
    told = "erased %d rows that were older than %g days, and %d snapshots were rewritten"
    run_logger().info(told, certificate.rows, days, len(certificate.snapshots))
    return certificate
