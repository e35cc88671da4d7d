"""The watch over promoted drafts, as a process that needs no orchestrator.

    python -m flows.watch --recipe FILE

`redraft up` runs it. It gives way to the service, and may be killed at any time: what it found is kept after each look.
"""

import argparse
import logging
import os
import sqlite3
import sys
import time
from contextlib import ExitStack
from typing import NoReturn

from infra.events import DRAFT_RESOURCE, DRAFT_TAKEN_BACK, Emitter
from infra.home import open_home
from infra.memory import read_memory
from infra.priority import lower_session
from infra.settings import load_settings
from infra.versions import ForeignVersion
from infra.watchdog import gives_way, go_first
from infra.watches import TAKEN_BACK, Watches
from models.recipe import Recipe, load_recipe

# Seconds that a watch before this one may take to end.
HAND_OVER_S = 20.0

log = logging.getLogger("redraft")


def main() -> int:
    """Watch until a signal comes; return 2 if there is nothing that could be watched here."""
    parser = argparse.ArgumentParser(prog="python -m flows.watch", description="Take back drafts that do worse.")
    parser.add_argument("--recipe", required=True)
    name = parser.parse_args().recipe
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = load_settings()
    settings.prepare_environment()
    lower_session()
    go_first()
    with ExitStack() as held:
        try:
            open_home(settings)
            held.enter_context(Watches(settings).alone(HAND_OVER_S))
            recipe = load_recipe(name)
        except ValueError as error:
            print(error, flush=True)
            return 2
        return _watch(recipe)


def _watch(recipe: Recipe) -> NoReturn:
    from tasks.watch_draft import watch_draft  # torch: too slow for who is refused

    emitter, look = Emitter(os.environ.get("PREFECT_API_URL", "")), gives_way(watch_draft.fn)
    while True:
        try:
            watch = look(recipe) if read_memory().room_gib > recipe.schedule.min_free_memory_gib else None
        except (ConnectionError, sqlite3.Error, ForeignVersion) as error:  # of registry or log: it may pass
            log.warning("no look this time: %s", error)
        else:
            if watch is not None and watch.outcome == TAKEN_BACK:
                told = {"previous": watch.previous, "told": watch.told(), "evidence": watch.evidence}
                emitter.emit(DRAFT_TAKEN_BACK, str(watch.draft), told, DRAFT_RESOURCE)
        time.sleep(recipe.post_promotion_test.period_s)


if __name__ == "__main__":
    sys.exit(main())
