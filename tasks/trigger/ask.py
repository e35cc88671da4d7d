"""Ask the orchestrator for a refresh when one is due, until a run acknowledges it.

The wish is a state beside the query log, and each look reads it anew: whatever is down or busy meanwhile, the wish
stays. Asking again with the same key makes no second run. Where a run ended without acknowledging it, such as one that
was cancelled because another was active, the next key asks for another.
"""

import logging
import sqlite3
import threading
from collections.abc import Callable

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectException

from infra.machine import free_memory_gib
from infra.querylog import QueryLog
from infra.triggerfile import LastLook, Snapshot, TriggerFile, Wish
from infra.triggers import Due, Fallen, Looked
from infra.waiting import Queue
from models.recipe import Recipe
from models.watch import enough_rows

LOOK_S = 3.0
# A run that ended without a word is followed by another after so long: a runner that fails must not be flooded.
PAUSE_S = 20.0
MAX_ERROR_CHARS = 300

log = logging.getLogger(__name__)

Orchestrator = Callable[[Wish], bool]


class Asker:
    """Looks now and then whether a refresh is due, and asks for it."""

    def __init__(self, recipe: Recipe, log: QueryLog, trigger: TriggerFile, orchestrator: Orchestrator) -> None:
        """Take what a look needs.

        Args:
            recipe: what the refreshes run with, and when.
            log: whose rows they train on.
            trigger: what is wanted.
            orchestrator: takes a wish and makes one run of it, however often it is asked; returns whether that run has
                ended. Raises OSError if it can't be asked.
        """
        self._recipe, self._log, self._trigger, self._orchestrator = recipe, log, trigger, orchestrator
        self._from_ms = trigger.clock()
        self._paused_ms: int | None = None

    def run(self, stop: threading.Event) -> None:
        """Look until `stop` is set."""
        while not stop.wait(LOOK_S):
            try:
                self.look()
            except (sqlite3.Error, OSError, ValueError) as error:
                log.warning("nobody could look whether a refresh is due: %s", error)
        self._log.close()

    def look(self) -> None:
        """Look once, and ask if a refresh is due."""
        self._trigger.find_lost()
        before = self._trigger.snapshot()
        wanted = self._judge(before)
        seen = self._trigger.snapshot()
        short, error = "", ""
        if not seen.running and any(isinstance(state, Due) for state in seen.domains.values()):
            short = _short_of_memory(self._recipe.schedule.min_free_memory_gib)
            if not short and not self._is_paused():
                error = self._ask()
        self._note(before, wanted, short, error)

    def _judge(self, seen: Snapshot) -> dict[str, int]:
        """Let fallen domains become due, and return how many rows of its own each of them wants."""
        queue = Queue(rows=self._log.waiting()[0] if seen.domains else {})
        refresh = self._recipe.refresh
        wanted, events = {}, {}
        for domain, state in seen.domains.items():
            if isinstance(state, Fallen | Due):
                fall, num_rows = state.fall, max(queue.full(), refresh.min_rows)
                wanted[domain] = enough_rows(fall.promised - fall.served, num_rows, refresh.held_out_fraction)
                enough = is_enough(domain, queue, wanted[domain], refresh.min_rows, refresh.max_rows)
                events[domain] = Looked(enough=enough, now_ms=self._trigger.clock())
        self._trigger.tell(events)
        return wanted

    def _ask(self) -> str:
        """Ask the orchestrator; return why it could not be asked, "" if it could."""
        wish = self._trigger.wish()
        try:
            ended = self._orchestrator(wish)
        except OSError as error:
            return str(error)[:MAX_ERROR_CHARS]
        if ended:
            self._trigger.ask_anew(wish)
            self._paused_ms = self._trigger.clock()
        return ""

    def _is_paused(self) -> bool:
        # A clock that is set ends the pause, in either direction.
        return self._paused_ms is not None and 0 <= self._trigger.clock() - self._paused_ms < PAUSE_S * 1000

    def _note(self, before: Snapshot, wanted: dict[str, int], short: str, error: str) -> None:
        at_ms, last, schedule = self._trigger.clock(), before.last_look, self._recipe.schedule
        since_ms = last.error_since_ms if last is not None and last.error else at_ms
        if error and since_ms == at_ms:
            log.warning("the orchestrator can't be asked for a refresh: %s", error)
        look = LastLook(
            at_ms=at_ms,
            min_rows=self._recipe.refresh.min_rows,
            wanted=wanted,
            interval_s=schedule.refresh_interval_s,
            interval_from_ms=self._from_ms,
            short_of_memory=short,
            error=error,
            error_since_ms=since_ms if error else None,
        )
        if last is None or not last.covers(look):
            self._trigger.note(look)


def is_enough(domain: str, queue: Queue, wanted: int, min_rows: int, max_rows: int) -> bool:
    """Return whether a refresh for a fallen domain is worth its while.

    Args:
        domain: the fallen one.
        queue: the rows that wait.
        wanted: rows of the domain.
        min_rows: rows of all domains.
        max_rows: the most rows of one refresh; more are not waited for.
    """
    total, of_domain = queue.full(), queue.full(domain)
    return total >= min_rows and of_domain > 0 and (of_domain >= wanted or total >= max_rows)


def prefect_server(deployment: str) -> Orchestrator:
    """Return the orchestrator of PREFECT_API_URL, asked for runs of a deployment, "FLOW/NAME"."""

    def ask(wish: Wish) -> bool:
        try:
            with get_client(sync_client=True) as client:
                found = client.read_deployment_by_name(deployment)
                run = client.create_flow_run_from_deployment(found.id, idempotency_key=wish.key)
        except ObjectNotFound as error:
            raise ConnectionError(f"deployment {deployment} was not found") from error
        except (httpx.HTTPError, PrefectException, RuntimeError) as error:  # RuntimeError: no server to start up
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        return run.state is not None and run.state.is_final()

    return ask


def _short_of_memory(wanted_gib: float) -> str:
    free_gib = free_memory_gib()
    return "" if free_gib >= wanted_gib else f"{free_gib:.1f} GiB free, {wanted_gib:g} wanted"
