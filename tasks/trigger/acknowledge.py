"""Say that a refresh runs, and what came of it, so that what asked for it knows (infra/triggers.py)."""

import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from typing import Literal

from infra.serving import is_served
from infra.settings import load_settings
from infra.triggerfile import WAITS_FOR_MEMORY, Need, TriggerFile
from infra.triggers import Ok, Result, Retry
from infra.versions import Version
from infra.watchdog import Watchdog, gives_way
from models.precision import is_out_of_memory
from models.recipe import Recipe
from tasks.promote import Outcome
from tasks.stages.reporting import run_logger
from tasks.trigger.room import short_of_memory

RefreshOutcome = Outcome | Literal["nothing to do", "waits for memory"]
Refresh = Callable[[Recipe], tuple[RefreshOutcome, Version | None]]
RESULTS: dict[RefreshOutcome, Result] = {
    "promoted": "promoted",
    "already trained": "promoted",
    "undecided": "progress",
    "outdated": "outdated",
    "nothing to do": "deferred",
    WAITS_FOR_MEMORY: "deferred",
    "refused": "failed",
    "waits for approval": "failed",
}
# What a refresh took before counts for less with each further one.
FADES = 0.9


def acknowledged(refresh: Refresh) -> Refresh:
    """Return a refresh that acknowledges the wish for it when it starts, and tells what came of it.

    Where memory is short it does not begin and, beside a service, goes on no longer; either way it is wanted again once
    there is room. A run that is killed tells nothing, and is found gone. The trigger is only told: what it can't keep
    stops no run.
    """

    @wraps(refresh)
    def told(recipe: Recipe) -> tuple[RefreshOutcome, Version | None]:
        retry = Retry(first_s=recipe.schedule.retry_s, most_s=recipe.schedule.max_retry_s)
        settings = load_settings()
        trigger = TriggerFile(settings.querylog)
        with ExitStack() as held:
            try:
                end = held.enter_context(trigger.run(retry))
                seen = trigger.state()
            except (sqlite3.Error, OSError, ValueError) as error:
                run_logger().warning("the trigger's state can't be written: %s", error)
                return gives_way(refresh)(recipe)
            dog = Watchdog(lambda: is_served(settings.home), lambda why: _tell(end, "deferred", WAITS_FOR_MEMORY))
            try:
                if short := short_of_memory(recipe, seen, starts=True):
                    run_logger().warning("the refresh waits for memory: %s", short)
                    _tell(end, "deferred", WAITS_FOR_MEMORY)
                    return WAITS_FOR_MEMORY, None
                with dog.watching():
                    outcome, version = refresh(recipe)
            except Exception as error:
                lacks_memory = is_out_of_memory(error)
                _tell(end, *(("deferred", WAITS_FOR_MEMORY) if lacks_memory else ("failed", "failed")))
                raise
            except BaseException:
                _tell(end, "deferred", "stopped")
                raise
            _tell(end, RESULTS[outcome], outcome)
            if version is not None and outcome != "already trained":
                with suppress(sqlite3.Error, OSError):
                    before = seen.need.gib if seen.need else 0.0
                    trigger.note(Need(gib=max(dog.peak_gib, FADES * before)))  # what is cached takes little
            return outcome, version

    return told


def fallen_domains() -> tuple[str, ...]:
    """Return the domains whose acceptance fell and is not back, which the refresh at hand is wanted for, if any."""
    try:
        domains = TriggerFile(load_settings().querylog).state().domains.items()
        return tuple(name for name, state in domains if not isinstance(state, Ok) and state.fall.why == "fell")
    except (sqlite3.Error, OSError) as error:
        run_logger().warning("the trigger's state can't be read: %s", error)
        return ()


def _tell(end: Callable[[Result, str], None], result: Result, outcome: str) -> None:
    with suppress(sqlite3.Error, OSError):  # then the run is found gone, and the wish stays
        end(result, outcome)
