"""Let go of old drafts, results of finished steps, caches, work, copies and logs."""

from infra.clean import Item, clean_up
from infra.settings import load_settings
from models.recipe import Keep
from tasks.stages.reporting import run_logger
from tasks.stages.task import task


@task
def clean_home(keep: Keep, pool: int, dry_run: bool = False) -> list[tuple[Item, str]]:
    """Let go of what is beyond the limits, or only find it; see `infra.clean`."""
    going = clean_up(load_settings(), keep, pool, dry_run)
    run_logger().info("%d parts of the home go, %d MiB", len(going), sum(one.num_bytes for one, _ in going) >> 20)
    return going
