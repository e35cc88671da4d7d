"""The post-promotion test, as a process that needs no orchestrator.

    python -m flows.post_promotion --recipe FILE [--imported]

`redraft up` runs it. It gives way to the service, and may be killed at any time: what it found is kept after each look.
"""

import argparse
import logging
import os
import sys
import time
from contextlib import ExitStack
from typing import NoReturn

from infra.events import DRAFT_RESOURCE, DRAFT_ROLLED_BACK, Emitter
from infra.home import open_home
from infra.post_promotion import ROLLED_BACK, PostPromotionTests
from infra.priority import gives_way, go_first, lower_session, read_memory
from infra.settings import load_settings
from infra.versions import ForeignVersion
from models.recipe import Recipe, load_recipe

# Seconds that a process before this one may take to end.
HAND_OVER_S = 20.0

log = logging.getLogger("redraft")


def main() -> int:
    """Test promoted drafts until a signal comes; return 2 where that is not possible."""
    parser = argparse.ArgumentParser(description="Roll back drafts that do worse.")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--imported", action="store_true", help="Rows that were imported since count as served.")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = load_settings()
    settings.prepare_environment()
    lower_session()
    go_first()
    with ExitStack() as held:
        try:
            open_home(settings)
            held.enter_context(PostPromotionTests(settings).alone(HAND_OVER_S))
            recipe = load_recipe(given.recipe)
        except ValueError as error:
            print(error, flush=True)
            return 2
        return _look_on(recipe, given.imported)


def _look_on(recipe: Recipe, imported: bool) -> NoReturn:
    from tasks.post_promotion_test import check_promoted_draft  # torch: too slow for who is refused

    emitter, look = Emitter(os.environ.get("PREFECT_API_URL", "")), gives_way(check_promoted_draft.fn)
    while True:
        try:
            test = look(recipe, imported) if read_memory().room_gib > recipe.schedule.min_free_memory_gib else None
        except (ConnectionError, ForeignVersion) as error:  # of registry or log: it may pass
            log.warning("no look this time: %s", error)
        else:
            if test is not None and test.outcome == ROLLED_BACK:
                told = {"previous": test.previous, "told": test.told(), "evidence": test.evidence}
                emitter.emit(DRAFT_ROLLED_BACK, str(test.draft), told, DRAFT_RESOURCE)
        time.sleep(recipe.post_promotion_test.period_s)


if __name__ == "__main__":
    sys.exit(main())
