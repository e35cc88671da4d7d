"""Ask the orchestrator for a refresh when one is due, until a run acknowledges it.

The wish is a state in the query log's database, which each look reads anew: whatever is down or busy meanwhile, it
stays. Asking again with the same key makes no second run; where a run ended without acknowledging it, the next key asks
for another.
"""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from infra.consent import OTHER_DOMAINS
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.trigger_store import LastLook, RunRequest, TriggerState, TriggerStore
from infra.triggers import Due, Event, Fall, Fallen, Fell, Looked, Ok, Recovered
from infra.versions import Version
from infra.waiting import Queue
from models.core.evaluation.clusters import num_tests
from models.core.evaluation.drift_detector import enough_rows, is_low, usual_tau
from models.core.evaluation.gate import Evidence
from models.recipe import Recipe
from tasks.find_challenger import known_of_challenger
from tasks.stages.split import ForOthers, rows_of_others
from tasks.trigger.acknowledge import short_of_memory

LOOK_S = 3.0
# A run that ended without a word is followed by another after so long: a runner that fails must not be flooded.
PAUSE_S = 20.0
MAX_ERROR_CHARS = 300

log = logging.getLogger(__name__)

Orchestrator = Callable[[RunRequest], bool]
Known = Callable[[int], Evidence]
Champion = Callable[[], Version | None]


class RefreshTrigger:
    """Looks now and then whether a refresh is due, and asks for it."""

    def __init__(
        self,
        recipe: Recipe,
        log: QueryLog,
        trigger: TriggerStore,
        orchestrator: Orchestrator,
        known: Known,
        champion: Champion,
    ) -> None:
        """Take what a look needs; the last three arguments raise OSError if they can't say.

        Args:
            recipe: what the refreshes run with, and when.
            log: whose rows they train on.
            trigger: what is wanted.
            orchestrator: makes one run of a wish, however often it is asked; returns whether that run has ended.
            known: takes the first row of the next refresh and returns what is known of the challenger that it trains.
            champion: returns the draft that is to be served.
        """
        self._recipe, self._log, self._trigger, self._orchestrator = recipe, log, trigger, orchestrator
        self._known, self._evidence = known, Evidence.start(recipe.num_draft_tokens)
        self._champion, self._rows = champion, Counter[str]()
        self._known_at: object = None
        self._ends: object = None
        self._waits: ForOthers | None = None
        self._from_ms, self._ended_ms = trigger.clock(), -math.inf

    def run(self, stop: threading.Event) -> None:
        """Look until `stop` is set."""
        while not stop.wait(LOOK_S):
            try:
                self.look()
            except (OSError, ValueError) as error:
                log.warning("nobody could look whether a refresh is due: %s", error)
        self._log.close()

    def look(self) -> None:
        """Look once, and ask if a refresh is due."""
        self._trigger.find_lost()
        others = self._others()
        self._find_low()
        before = self._trigger.state()
        wanted = self._decide(before, others is not None)
        seen = self._trigger.state()
        is_due = self._is_time(seen) or any(isinstance(state, Due) for state in seen.domains.values())
        short, error = "", ""
        if not seen.running and (seen.waits_for_memory or is_due):
            short = short_of_memory(self._recipe, seen)
            ended_ms = seen.last_run.ended_ms if seen.last_run else None  # of one that went for want of memory
            may_try = is_due or not self._is_within(self._recipe.schedule.retry_s, ended_ms or 0)
            if not short and may_try and not self._is_within(PAUSE_S, self._ended_ms):
                error = self._ask()
        self._note(before, wanted, short, error, others)

    def _others(self) -> ForOthers | None:
        """Return what refreshes wait for from other keys; of rows that were looked at before only the time."""
        if (ends := (self._log.windows.cursor(), self._log.last_seq())) != self._ends:
            refresh = self._recipe.refresh
            self._ends, self._waits = ends, rows_of_others(self._log, refresh, self._trigger.clock())
            self._rows = self._log.waiting_domains(refresh.max_rows)
        if self._waits is not None and self._waits.until_ms <= self._trigger.clock():
            self._waits = None
        return self._waits

    def _find_low(self) -> None:
        """Tell which domains never had acceptance to lose and have rows to learn from, and which are low no more.

        Names of domains come from clients. So they come one at a time, the largest first, and not while a refresh runs,
        or another one is due or waits because a refresh did not help it. They go on with its attempts, and it is
        remembered for as long as it may have to wait at most.
        """
        seen = self._trigger.state()
        states = seen.domains
        low = {name: of.fall for name, of in states.items() if isinstance(of, Fallen | Due) and of.fall.why == "low"}
        enough = [domain for domain, num in self._rows.most_common() if num >= self._recipe.refresh.min_rows]
        new = [] if seen.running else [domain for domain in enough if domain not in low]
        if not low and not new:
            return
        try:
            champion = self._champion()
        except OSError as error:
            log.warning("nobody can say what the champion promises: %s", error)
            return
        if champion is None:
            return
        now_ms, promised, events = self._trigger.clock(), champion.lineage.tau, dict[str, Event]()
        for domain, fall in low.items():
            forgotten = now_ms - max(fall.since_ms, fall.wait_from_ms) > 1000 * self._recipe.schedule.max_retry_s
            if not is_low(domain, promised) or (forgotten and not self._rows[domain]):
                events[domain] = Recovered(why="low")
            elif fall.draft != champion.number:
                events[domain] = self._low(domain, champion)
        found = next((domain for domain in new if is_low(domain, promised)), None)
        busy = any(isinstance(states[name], Due) or fall.remaining_s(now_ms) for name, fall in low.items())
        if found is not None and not busy:
            attempts = max((fall.attempts for fall in low.values()), default=0)
            events[found] = self._low(found, champion, attempts)
        self._trigger.tell(events)

    def _low(self, domain: str, champion: Version, attempts: int = 0) -> Fell:
        served, now_ms = self._log.served_tau(domain), self._trigger.clock()
        promised, draft = usual_tau(domain, champion.lineage.tau) or served, champion.number
        return Fell(draft=draft, promised=promised, served=served, now_ms=now_ms, why="low", attempts=attempts)

    def _decide(self, seen: TriggerState, waits: bool) -> dict[str, int]:
        """Let fallen and low domains become due, and return how many rows of its own each of them wants."""
        if not seen.domains:
            return {}
        queue, refresh, groups = Queue(rows=self._log.waiting()[0]), self._recipe.refresh, self._log.waiting_groups()
        self._learn(seen)
        wanted, events = {}, {}
        for domain, state in seen.domains.items():
            if isinstance(state, Fallen | Due):
                wanted[domain] = self._wanted(domain, state.fall, max(queue.full(), refresh.min_rows), groups)
                enough = is_enough(domain, queue, wanted[domain], refresh.min_rows, refresh.max_rows)
                events[domain] = Looked(enough=enough and not waits, now_ms=self._trigger.clock())
        self._trigger.tell(events)
        return wanted

    def _wanted(self, domain: str, fall: Fall, num_rows: int, groups: Mapping[str, Mapping[str | None, int]]) -> int:
        """Return how many rows of a domain can be expected to hold as many tests as the gate needs.

        Of a low domain nobody knows how much it will gain, but mostly it is much: the rows of any refresh will do.
        """
        recipe, evidence = self._recipe, self._evidence
        if fall.why == "low":
            return recipe.refresh.min_rows
        of_domain = list(groups.values()) if domain == OTHER_DOMAINS else [groups.get(domain, {})]
        tests = enough_rows(
            fall.promised - fall.served,
            math.ceil(num_rows / rows_a_test(groups.values())),
            recipe.refresh.held_out_fraction,
            recipe.num_draft_tokens,
            evidence.alpha(recipe.gate),
            evidence.test.growth(),
        )
        return math.ceil(tests * rows_a_test(of_domain))

    def _learn(self, seen: TriggerState) -> None:
        """Ask how far the challenger is, where a run or a person may have changed that."""
        drafts = frozenset(state.fall.draft for state in seen.domains.values() if not isinstance(state, Ok))
        if (changed := (seen.last_run, drafts)) != self._known_at:
            try:
                self._evidence, self._known_at = self._known(self._log.windows.cursor() + 1), changed
            except OSError as error:
                log.warning("nobody can say how far the challenger is: %s", error)

    def _ask(self) -> str:
        """Ask the orchestrator; return why it could not be asked, "" if it could."""
        wish = self._trigger.wish()
        try:
            ended = self._orchestrator(wish)
        except OSError as error:
            return str(error)[:MAX_ERROR_CHARS]
        if ended:
            self._trigger.ask_anew(wish)
            self._ended_ms = self._trigger.clock()
        return ""

    def _is_time(self, seen: TriggerState) -> bool:
        """Return whether the interval is over since the last refresh began, or since the first look."""
        interval_s, begun_ms = self._recipe.schedule.refresh_interval_s, [self._from_ms]
        begun_ms += [seen.last_run.started_ms] if seen.last_run else []
        return interval_s is not None and not any(self._is_within(interval_s, of_ms) for of_ms in begun_ms)

    def _is_within(self, seconds: float, of_ms: float) -> bool:
        """Return whether a time was so lately; a clock that is set ends that, in either direction."""
        return 0 <= self._trigger.clock() - of_ms < seconds * 1000

    def _note(
        self, before: TriggerState, wanted: dict[str, int], short: str, error: str, others: ForOthers | None
    ) -> None:
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
            within_share=None if others is None else others.within,
            share_until_ms=0 if others is None else others.until_ms,
        )
        if last is None or not last.covers(look):
            self._trigger.note(look)


def champion_of_registry() -> Version | None:
    """Return the registry's champion."""
    return open_registry().champion("draft")


def of_registry(recipe: Recipe) -> Known:
    """Return what the registry's champion is challenged with; nothing is known without a champion."""

    def known(first_seq: int) -> Evidence:
        registry, num_draft_tokens, champion = open_registry(), recipe.num_draft_tokens, champion_of_registry()
        if champion is None:
            return Evidence.start(num_draft_tokens)
        return known_of_challenger(registry, champion.number, first_seq, num_draft_tokens)[1]

    return known


def is_enough(domain: str, queue: Queue, wanted: int, min_rows: int, max_rows: int) -> bool:
    """Return whether a refresh for a fallen or low domain is worth its while; it waits for `max_rows` at most."""
    total, of_domain = queue.full(), queue.full(domain)
    return total >= min_rows and of_domain > 0 and (of_domain >= wanted or total >= max_rows)


def rows_a_test(domains: Iterable[Mapping[str | None, int]]) -> float:
    """Return how many rows bring one test, by each domain's groups; 1 where no rows are said to belong together."""
    counts = [(sum(groups.values()), num_tests(groups)) for groups in domains]
    tests = sum(number for _, number in counts)
    return sum(rows for rows, _ in counts) / tests if tests else 1.0


def prefect_server(deployment: str) -> Orchestrator:
    """Return the orchestrator of PREFECT_API_URL, asked for runs of a deployment, "FLOW/NAME"."""

    def ask(wish: RunRequest) -> bool:
        try:
            # The next look asks again. A client that tries again itself takes a minute over a server that is gone.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
                found = client.read_deployment_by_name(deployment)
                run = client.create_flow_run_from_deployment(found.id, idempotency_key=wish.key)
        except ObjectNotFound as error:
            raise ConnectionError(f"deployment {deployment} was not found") from error
        except (httpx.HTTPError, PrefectException, RuntimeError) as error:  # RuntimeError: no server to start up
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        return run.state is not None and run.state.is_final()

    return ask
