"""Say that a refresh runs, and what came of it, so that what asked for it knows (infra/triggers.py)."""

import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from typing import Literal

from infra.registry import Version
from infra.settings import load_settings
from infra.triggerfile import TriggerFile
from infra.triggers import Result, Retry
from models.recipe import Recipe
from tasks.promote import Outcome
from tasks.stages.reporting import run_logger

RefreshOutcome = Outcome | Literal["nothing to do"]
Refresh = Callable[[Recipe], tuple[RefreshOutcome, Version | None]]
RESULTS: dict[RefreshOutcome, Result] = {
    "promoted": "promoted",
    "already trained": "promoted",
    "undecided": "progress",
    "outdated": "outdated",
    "nothing to do": "put off",
    "refused": "in vain",
    "waits for approval": "in vain",
}


def acknowledged(refresh: Refresh) -> Refresh:
    """Return a refresh that acknowledges the wish for it when it starts, and tells what came of it.

    A run that is killed tells nothing, and is found gone. The trigger is only told: what it can't keep stops no run.
    """

    @wraps(refresh)
    def told(recipe: Recipe) -> tuple[RefreshOutcome, Version | None]:
        retry = Retry(first_s=recipe.schedule.retry_s, most_s=recipe.schedule.max_retry_s)
        with ExitStack() as held:
            try:
                end = held.enter_context(TriggerFile(load_settings().querylog).run(retry))
            except (sqlite3.Error, OSError) as error:
                run_logger().warning("the trigger's state can't be written: %s", error)
                return refresh(recipe)
            try:
                outcome, version = refresh(recipe)
            except Exception:
                _tell(end, "in vain", "failed")
                raise
            except BaseException:
                _tell(end, "put off", "stopped")
                raise
            _tell(end, RESULTS[outcome], outcome)
            return outcome, version

    return told


def _tell(end: Callable[[Result, str], None], result: Result, outcome: str) -> None:
    with suppress(sqlite3.Error, OSError):  # then the run is found gone, and the wish stays
        end(result, outcome)
