"""What the loop waits for, by what the home holds."""

from collections import Counter

import pytest

from infra.trigger_store import WAITS_FOR_MEMORY, LastLook, LastRun, TriggerState, duration
from infra.triggers import Due, Fall, Fallen, Retry, Running, State
from infra.versions import Version
from infra.waiting import Queue, Runner, waiting_for
from tests.tags import draft_tags

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
MADE_MS = NOW_MS - 72 * HOUR_MS
RETRY = Retry(first_s=60, most_s=500)
FALL = Fall(draft=1, promised=1.72, served=1.05, since_ms=NOW_MS - HOUR_MS)
LATER = FALL.model_copy(update={"attempts": 2, "wait_from_ms": NOW_MS - 60_000, "wait_s": 600.0})
LOOK = LastLook(
    at_ms=NOW_MS - 3_000, min_rows=180, wanted={"code": 65}, interval_s=3600, interval_from_ms=NOW_MS - 600_000
)
OTHERS = "rows of other keys: 2 of 180 are within one key's share, 30 min more at most"
FELL = "(code fell to τ 1.05, 1.72 was promised)"


def version(number: int, **tags: str) -> Version:
    tags = draft_tags(**tags)
    return Version(kind="draft", number=number, sha256="a" * 64, tags=tags, created_ms=NOW_MS - 2 * HOUR_MS)


FIRST = version(1)


def rows(full: int, metadata: int = 0, domain: str = "code", **others: int) -> Queue:
    counted = {domain: Counter(full=full, metadata=metadata)} | {name: Counter(full=n) for name, n in others.items()}
    return Queue(rows=counted, first_ms=NOW_MS - HOUR_MS)


def line(
    queue: Queue,
    state: State | None = None,
    drafts: tuple[Version, ...] = (FIRST,),
    look: LastLook | None = LOOK,
    running: bool = False,
    runner: Runner | None = None,
) -> str:
    domains = {} if state is None else {"code": state}
    run = LastRun(started_ms=NOW_MS - 120_000, ended_ms=None if running else NOW_MS - 60_000, retry=RETRY)
    seen = TriggerState(domains=domains, running=running, last_run=run, last_look=look)
    found = waiting_for(drafts[-1] if drafts else None, drafts, queue, seen, MADE_MS, NOW_MS, runner)
    return f"{found.what} | {found.line(NOW_MS)}"


LOW, USUAL = FALL.model_copy(update={"why": "low"}), "(code has τ 1.05, 1.72 is usual)"


@pytest.mark.parametrize(
    ("home", "told"),
    [
        ({"drafts": ()}, "build | a first draft: redraft build --recipe FILE; for 3 d"),
        ({"running": True}, "refresh | the refresh that is running; for 2 min"),
        ({"state": Running(fall=FALL), "running": True}, f"refresh | the refresh that is running {FELL}; for 2 min"),
        ({"state": Running(fall=LOW), "running": True}, f"refresh | the refresh that is running {USUAL}; for 2 min"),
        ({"state": Due(fall=LOW)}, f"orchestrator | the orchestrator, which was asked for a refresh {USUAL}; for 1 h"),
    ],
)
def test_it_waits_for_a_draft_for_what_runs_and_for_who_was_asked(home: dict[str, object], told: str) -> None:
    assert line(rows(500), **home) == told


@pytest.mark.parametrize(("tags", "waits"), [({}, True), ({"previous": "1"}, False), ({"quarantined": "bad"}, False)])
def test_a_draft_that_passed_waits_for_approval(tags: dict[str, str], waits: bool) -> None:
    told = line(rows(0), drafts=(version(2, gate="passed", parent="1", **tags), FIRST))
    wanted = "approval | approval of draft 2, which passed its gate: redraft promote 2; for 2 h"
    assert (told == wanted) == waits


def test_a_past_draft_that_waits_for_approval_is_named_with_what_it_returns_for() -> None:
    second = version(2, parent="1", gate="passed", previous="1")
    back = version(3, parent="1", gate="passed", gated_against="2", returns_for="code")
    seen = TriggerState(domains={}, running=False, last_run=None, last_look=LOOK)
    found = waiting_for(second, (back, second, FIRST), rows(0), seen, MADE_MS, NOW_MS)
    words = "approval of draft 3, which passed its gate (draft 1 returns for code): redraft promote 3"
    assert (found.what, found.words) == ("approval", words)


@pytest.mark.parametrize("look", [None, LOOK.model_copy(update={"at_ms": NOW_MS - 2 * HOUR_MS})])
def test_where_nobody_looks_it_waits_for_the_orchestrator(look: LastLook | None) -> None:
    told = "orchestrator | the orchestrator: nothing starts refreshes by itself; run: redraft up; for 2 h"
    assert line(rows(500), Due(fall=FALL), look=look) == told


@pytest.mark.parametrize("look", [None, LOOK.model_copy(update={"at_ms": NOW_MS - 2 * HOUR_MS})])
@pytest.mark.parametrize(
    ("started", "since_s", "told"),
    [
        (False, 20, "the service to answer; the first look whether a refresh is due comes 40 s later"),
        (True, 5, "the first look whether a refresh is due, in 35 s"),
        (True, 300, "the orchestrator, which has not looked whether a refresh is due; see: redraft logs runner"),
    ],
)
def test_after_a_start_it_waits_for_the_first_look(look, started, since_s, told) -> None:
    runner = Runner(started=started, since_ms=NOW_MS - 1000 * since_s)
    assert line(rows(500), look=look, runner=runner) == f"orchestrator | {told}; for {duration(since_s)}"


UNLOGGED = Queue(rows={}, unlogged=256)
SHORT, REFUSED = "0.2 GiB free, 0.5 wanted", {"error": "refused", "error_since_ms": NOW_MS - 60_000}
SHARED = {"within_share": 2, "share_until_ms": NOW_MS + HOUR_MS // 2}
NO_CONSENT = "consent: 240 requests may not be trained on, and 4 of 180 may"
NO_CONSENT_IN_CODE = "consent: 240 requests of code may not be trained on, and 4 of 65 may"


@pytest.mark.parametrize(
    ("queue", "state", "look", "what", "words"),
    [
        (rows(84), Fallen(fall=FALL), {}, "rows", "rows: 84 of 180"),
        (rows(20, chat=300), Fallen(fall=FALL), {}, "rows", "rows of code: 20 of 65"),
        (rows(4, metadata=240), Fallen(fall=FALL), {}, "consent", NO_CONSENT),
        (rows(4, metadata=240, chat=300), Fallen(fall=FALL), {}, "consent", NO_CONSENT_IN_CODE),
        (rows(240), Fallen(fall=LATER), {}, "time", "time: the next refresh in 9 min, after 2 failed refreshes"),
        (rows(240), Fallen(fall=LATER), SHARED, "rows", OTHERS),
        (rows(240), Due(fall=FALL), {"short_of_memory": SHORT}, "memory", f"memory to train in: {SHORT}"),
        (rows(240), Due(fall=FALL), REFUSED, "orchestrator", "the orchestrator, which takes no refresh (refused)"),
        (rows(240), Due(fall=FALL), {}, "orchestrator", "the orchestrator, which was asked for a refresh"),
    ],
)
def test_for_a_fallen_domain_it_says_what_is_lacking(queue, state, look, what, words) -> None:
    since = "1 min" if look is REFUSED else "1 h"
    assert line(queue, state, look=LOOK.model_copy(update=look)) == f"{what} | {words} {FELL}; for {since}"


@pytest.mark.parametrize(
    ("short", "told"),
    [
        ("0.2 GiB to spare, 1.5 wanted", "memory to train in: 0.2 GiB to spare, 1.5 wanted"),
        ("", "memory to train in, which ran short; there is room again"),
    ],
)
def test_where_a_refresh_went_for_want_of_memory_it_waits_for_that_first(short: str, told: str) -> None:
    run = LastRun(started_ms=NOW_MS, ended_ms=NOW_MS - 60_000, outcome=WAITS_FOR_MEMORY, retry=RETRY)
    look = LOOK.model_copy(update={"short_of_memory": short})
    seen = TriggerState(domains={"code": Fallen(fall=FALL)}, running=False, last_run=run, last_look=look)
    found = waiting_for(FIRST, (FIRST,), rows(4), seen, MADE_MS, NOW_MS)
    assert (found.what, found.line(NOW_MS)) == ("memory", f"{told}; for 1 min")


@pytest.mark.parametrize(
    ("queue", "interval_s", "told"),
    [
        (rows(40), 3600, "rows | rows: 40 of 180; for 1 h"),
        (rows(0, metadata=500), 9, "consent | consent: 500 requests may not be trained on, and 0 of 180 may; for 1 h"),
        (UNLOGGED, 9, "consent | consent: 256 requests may not be trained on, and 0 of 180 may; for 1 min"),
        (Queue(rows={}), 3600, "rows | rows: 0 of 180; for 1 min"),
        (rows(500), 3600, "time | time: the next scheduled refresh in 58 min at most; for 2 min"),
        (rows(500), None, "time | acceptance to fall; no refresh is scheduled; for 10 min"),
    ],
)
def test_while_acceptance_is_good_it_waits_for_the_schedule(queue: Queue, interval_s: float | None, told: str) -> None:
    assert line(queue, look=LOOK.model_copy(update={"interval_s": interval_s})) == told


def test_it_says_that_a_scheduled_refresh_waits_for_rows_of_other_keys() -> None:
    waits = LOOK.model_copy(update=SHARED)
    assert line(rows(240), look=waits) == f"rows | {OTHERS}; for 1 h"
    assert line(rows(40), look=waits) == "rows | rows: 40 of 180; for 1 h"


@pytest.mark.parametrize(("seconds", "told"), [(3, "3 s"), (90, "2 min"), (5400, "2 h"), (200_000, "2 d")])
def test_a_duration_is_told_in_its_largest_unit(seconds: float, told: str) -> None:
    assert duration(seconds) == told
