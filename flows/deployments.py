"""When flows run by themselves: by the clock, and `refresh` when asked, at intervals and as acceptance fell or is low.

    python -m flows.deployments --recipe FILE

serves both on this machine, which needs a Prefect server (`redraft up` starts one), and asks it for a refresh for as
long as one is due. On a cluster the same deployments are applied to a work pool: call `deployments(recipe,
work_pool="…")` and `apply()` each, and run this with `--only-ask` where the query log is.
"""

import argparse
import threading
from typing import Any

from prefect import serve
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.types.entrypoint import EntrypointType

from flows.build import build
from flows.clean import clean, retain
from flows.refresh import refresh
from infra.home import open_home
from infra.priority import go_first, lower_session
from infra.querylog import QueryLog
from infra.settings import load_settings
from infra.trigger_store import TriggerStore
from models.recipe import Recipe, load_recipe
from tasks.trigger.ask import RefreshTrigger, champion_of_registry, of_registry, prefect_server

# A second run would wait for the window that the first one holds, and then find it trained.
ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
NAME = "online"
EVERY_NIGHT, AFTER_IT = "17 3 * * *", "47 3 * * *"


def deployments(recipe: Recipe, work_pool: str | None = None) -> list[Any]:
    """Return the deployments of a recipe, for the workers of a pool or, without one, for `serve` on this machine."""
    common: dict[str, Any] = {
        "parameters": {"recipe": recipe.model_dump(mode="json")},
        "concurrency_limit": ONE_AT_A_TIME,
        "work_pool_name": work_pool,
        "entrypoint_type": EntrypointType.MODULE_PATH,
        # A recipe's methods are open to new files: the flow checks them by name, a schema on the server would not.
        "enforce_parameter_schema": False,
    }
    schedule = recipe.schedule
    served = [
        build.to_deployment(NAME, cron=schedule.build_cron, **common),
        refresh.to_deployment(NAME, **common),  # asked for: while one runs, an interval would make runs to be cancelled
    ]
    if schedule.retain_days is not None:  # by the clock: an interval would begin anew at each start
        served.append(retain.to_deployment(NAME, cron=EVERY_NIGHT, **common))
    served.append(clean.to_deployment(NAME, cron=AFTER_IT, **common))
    return served


def main() -> None:
    """Serve a recipe's deployments until a signal comes; what they run gives way to a service on the same machine."""
    lower_session()
    go_first()
    parser = argparse.ArgumentParser(prog="python -m flows.deployments", description="Run flows when they are due.")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--only-ask", action="store_true", help="serve nothing: workers of a pool run the flows")
    options = parser.parse_args()
    recipe, stop = load_recipe(options.recipe), threading.Event()
    settings = load_settings()
    settings.prepare_environment()  # for the processes that run the flows
    open_home(settings)
    orchestrator = prefect_server(f"{refresh.name}/{NAME}")
    known, champion = of_registry(recipe), champion_of_registry
    asker = RefreshTrigger(
        recipe, QueryLog(settings.querylog), TriggerStore(settings.querylog), orchestrator, known, champion
    )
    if options.only_ask:
        asker.run(stop)
    else:
        threading.Thread(target=asker.run, args=(stop,), name="asker", daemon=True).start()
        serve(*deployments(recipe), print_starting_message=False)


if __name__ == "__main__":
    main()
