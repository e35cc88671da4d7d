"""Six simulated hours of bad acceptance, and whoever starts refreshes being down, busy or forgetful."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.querylog import QueryLog
from infra.triggerfile import WAITS_FOR_MEMORY, Need, TriggerFile, Wish
from infra.triggers import Due, Fallen, Fell, Recovered, Result, Retry
from infra.waiting import Queue
from models.evaluation.gate import Evidence
from models.recipe import Recipe, load_recipe
from tasks.trigger.ask import Asker, is_enough, prefect_server
from tests.infra.rows import row

MINUTE_MS = 60_000
NOTHING, REFUSED, PROMOTED = ("put off", "nothing to do"), ("in vain", "refused"), ("promoted", "promoted")


@dataclass
class Home:
    """A log, a trigger on a clock that stands still, and an orchestrator that makes one run of a wish."""

    folder: Path
    now_ms: int = 1_700_000_000_000
    up: bool = True
    loses_runs: bool = False
    runs: list[str] = field(default_factory=list)
    minutes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = QueryLog(self.folder / "queries.db")
        self.trigger = TriggerFile(self.log.path, lambda: self.now_ms)
        self.recipe: Recipe = load_recipe("smollm2-cpu")
        schedule = self.recipe.schedule
        self.retry = Retry(first_s=schedule.retry_s, most_s=schedule.max_retry_s)
        self.trigger.note(Need(gib=0.01))
        self.evidence = Evidence.start(self.recipe.num_draft_tokens)
        self.firsts: list[int] = []
        self.asker = Asker(self.recipe, self.log, self.trigger, self.orchestrate, self.known)
        self.num_rows = 0

    def orchestrate(self, wish: Wish) -> bool:
        if not self.up:
            raise ConnectionError("refused")
        if wish.key not in self.runs:
            self.runs.append(wish.key)
        return self.loses_runs

    def known(self, first_seq: int) -> Evidence:
        self.firsts.append(first_seq)
        return self.evidence

    def serve(self, number: int, domain: str = "code", served: float = 1.05, key: str | None = None) -> None:
        said = {"key": key} if key is None else {"key": key, "time_ms": self.now_ms}
        names = (f"{domain}-{self.num_rows + one}" for one in range(number))
        self.log.append([row(name, domain).model_copy(update=said) for name in names])
        self.num_rows += number
        self.trigger.tell({domain: Fell(draft=1, promised=1.72, served=served, now_ms=self.now_ms)})

    def pass_minutes(self, number: int, each: int = 1) -> None:
        for _ in range(0, number, each):
            self.now_ms += each * MINUTE_MS
            self.asker.look()

    def refresh(self, end: tuple[Result, str]) -> None:
        """Do what flow `refresh` does."""
        with self.trigger.run(self.retry) as tell:
            if end != NOTHING and (window := self.log.claim(f"run {self.now_ms}", 2000, self.recipe.refresh.min_rows)):
                self.log.commit(window)
            tell(*end)

    @property
    def asked(self) -> int:
        return len(self.runs)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.log.close()


@pytest.mark.slow
def test_84_of_180_rows_wait_and_later_240_start_it(home: Home) -> None:
    home.serve(84)
    home.pass_minutes(30, each=10)
    assert home.asked == 0
    home.serve(240 - 84)
    home.pass_minutes(1)
    assert home.asked == 1
    home.pass_minutes(5)
    assert home.asked == 1  # the same run, until it starts or ends
    home.refresh(PROMOTED)
    home.pass_minutes(60, each=10)
    assert home.asked == 1


def test_a_flood_of_one_key_waits_for_rows_of_others_but_not_for_ever(home: Home) -> None:
    home.serve(1, key="b" * 64)
    home.serve(400, key="a" * 64)
    home.pass_minutes(50, each=10)
    look = home.trigger.snapshot().last_look
    assert look is not None
    assert (home.asked, look.within_share, look.share_until_ms) == (0, 2, 1_700_000_000_000 + 60 * MINUTE_MS)
    home.pass_minutes(10, each=10)
    look = home.trigger.snapshot().last_look
    assert look is not None
    assert (home.asked, look.within_share) == (1, None)


def test_rows_of_others_end_the_wait_for_them(home: Home) -> None:
    home.serve(1, key="b" * 64)
    home.serve(400, key="a" * 64)
    home.pass_minutes(1)
    home.serve(99, key="b" * 64)
    home.pass_minutes(1)
    assert home.asked == 1


def test_f32_what_fell_while_the_orchestrator_is_down_starts_once_it_is_back(home: Home) -> None:
    home.up = False
    home.serve(240)
    home.pass_minutes(90, each=10)
    look = home.trigger.snapshot().last_look
    assert look is not None
    assert (look.error, look.error_since_ms) == ("refused", 1_700_000_000_000 + 10 * MINUTE_MS)
    home.up = True
    home.pass_minutes(1)
    assert home.asked == 1


@pytest.mark.slow
def test_f32_what_fell_while_a_refresh_runs_is_followed_by_another(home: Home) -> None:
    with home.trigger.run(home.retry) as end:
        home.serve(240)
        home.pass_minutes(10)
        assert home.asked == 0
        end(*REFUSED)
    home.pass_minutes(1)
    assert home.asked == 1


def test_a_run_that_never_started_is_asked_for_anew(home: Home) -> None:
    """As the orchestrator cancels one while another is active."""
    home.loses_runs = True
    home.serve(240)
    home.pass_minutes(3)
    assert home.asked == 3


@pytest.mark.slow
def test_six_hours_of_bad_acceptance_ask_again_and_again_with_waits_that_double(home: Home) -> None:
    starts = []
    for minute in range(0, 360, 4):
        home.up = not 60 <= minute < 120  # the orchestrator is down for an hour
        home.serve(40)
        before = home.asked
        home.pass_minutes(4, each=4)
        if home.asked > before:
            starts.append(minute)
            home.refresh(REFUSED)
    waits = [after - before for before, after in pairwise(starts)]
    assert starts[0] == 16  # 200 rows
    assert len(starts) >= 5
    assert not any(60 <= start < 120 for start in starts)
    assert 120 in starts
    assert waits[-2:] == [40, 80]


def test_nothing_is_asked_for_once_acceptance_is_back(home: Home) -> None:
    home.serve(84)
    home.pass_minutes(1)
    home.trigger.tell({"code": Recovered()})
    home.log.append([row(f"late-{one}", "code") for one in range(200)])
    home.pass_minutes(10)
    assert home.asked == 0


def test_progress_goes_on_with_the_next_rows_and_a_run_that_did_nothing_waits(home: Home) -> None:
    home.serve(240)
    home.pass_minutes(1)
    home.refresh(("progress", "undecided"))
    home.pass_minutes(10)
    assert home.asked == 1
    home.serve(200)
    home.pass_minutes(1)
    assert home.asked == 2
    home.refresh(NOTHING)
    home.pass_minutes(4)
    assert home.asked == 2
    home.pass_minutes(1)
    assert home.asked == 3


def test_without_memory_no_refresh_is_asked_for_and_the_look_says_so(home: Home) -> None:
    schedule = home.recipe.schedule.model_copy(update={"min_free_memory_gib": 1e6})
    recipe = home.recipe.model_copy(update={"schedule": schedule})
    home.asker = Asker(recipe, home.log, home.trigger, home.orchestrate, home.known)
    home.serve(240)
    home.pass_minutes(1)
    seen = home.trigger.snapshot()
    assert home.asked == 0
    assert isinstance(seen.domains["code"], Due)
    assert seen.last_look is not None
    assert seen.last_look.short_of_memory.endswith("GiB to spare, 1000000.0 wanted")


def test_a_run_that_went_for_want_of_memory_is_asked_for_again_once_there_is_room(home: Home) -> None:
    home.log.append([row(f"chat-{one}") for one in range(240)])
    home.refresh(("put off", WAITS_FOR_MEMORY))  # by the clock, no domain fell
    home.trigger.note(Need(gib=1e6))
    home.pass_minutes(30, each=10)
    seen = home.trigger.snapshot()
    assert (home.asked, seen.waits_for_memory) == (0, True)
    assert seen.last_look is not None
    assert seen.last_look.short_of_memory.endswith("wanted")
    home.trigger.note(Need(gib=0.01))
    home.pass_minutes(1)
    assert home.asked == 1
    home.refresh(PROMOTED)
    home.pass_minutes(30, each=10)
    assert home.asked == 1


def test_a_run_that_was_ended_for_memory_is_not_asked_for_at_once(home: Home) -> None:
    home.trigger.note(Need(gib=0.01))
    home.refresh(("put off", WAITS_FOR_MEMORY))
    home.pass_minutes(4)
    assert home.asked == 0
    home.pass_minutes(1)
    assert home.asked == 1


def test_a_rare_domain_wants_rows_of_its_own_until_a_refresh_can_take_no_more(home: Home) -> None:
    home.serve(10)
    home.log.append([row(f"chat-{one}") for one in range(500)])
    home.pass_minutes(1)
    assert isinstance(home.trigger.snapshot().domains["code"], Fallen)
    home.log.append([row(f"more-{one}") for one in range(1500)])
    home.pass_minutes(1)
    assert home.asked == 1


def test_of_rows_that_belong_together_as_many_more_are_wanted(home: Home) -> None:
    def wanted_with(size: int) -> int:
        groups = (f"{one // size:064x}" for one in range(240))
        alone = [row(f"{'single' if size == 1 else 'grouped'}-{one}", "code") for one in range(240)]
        rows = alone if size == 1 else [one.model_copy(update={"group": next(groups)}) for one in alone]
        home.log.append(rows)
        home.trigger.tell({"code": Fell(draft=1, promised=1.72, served=1.05, now_ms=home.now_ms)})
        home.pass_minutes(1)
        look = home.trigger.snapshot().last_look
        assert look is not None
        home.log.commit(home.log.claim(f"run {size}", 2000, 1))
        return look.wanted["code"]

    alone, of_eight = wanted_with(1), wanted_with(8)
    assert 5 * alone < of_eight < 9 * alone


def test_where_domains_are_not_told_apart_all_rows_count(home: Home) -> None:
    home.log.append([row(f"chat-{one}") for one in range(240)])
    queue = Queue(rows=home.log.waiting()[0])
    assert is_enough("other", queue, 200, 180, 2000)
    assert not is_enough("code", queue, 200, 180, 2000)


def test_f24_an_asker_on_a_clock_that_jumps_goes_on(home: Home) -> None:
    home.serve(240)
    home.pass_minutes(1)
    home.refresh(REFUSED)
    home.now_ms -= 10**10  # four months back
    home.serve(240)
    home.pass_minutes(6)
    assert home.asked == 2


def test_how_many_rows_are_wanted_follows_from_how_far_the_challenger_is(home: Home) -> None:
    def wanted() -> int:
        home.pass_minutes(1)
        look = home.trigger.snapshot().last_look
        assert look is not None
        return look.wanted["code"]

    home.serve(10)
    fresh = wanted()
    home.evidence = home.evidence.another().another()  # each is allowed a smaller error
    assert wanted() == fresh  # nothing ran, so nobody was asked again
    home.refresh(("in vain", "refused"))
    third = wanted()
    home.evidence = Evidence.start(home.recipe.num_draft_tokens, challenger=3)
    home.evidence = home.evidence.model_copy(update={"test": home.evidence.test.after([0.5] * 40)})
    home.refresh(("progress", "undecided"))
    assert wanted() < fresh < third
    assert home.firsts == [1, 1, 1]


def test_where_the_registry_is_down_what_was_known_stays(home: Home) -> None:
    def unknown(first_seq: int) -> Evidence:
        raise ConnectionError("refused")

    home.asker = Asker(home.recipe, home.log, home.trigger, home.orchestrate, unknown)
    home.serve(240)
    home.pass_minutes(1)
    assert home.asked == 1


def test_f32_a_server_that_goes_while_it_is_asked_is_asked_once_a_look() -> None:
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drop() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # shut down below
                    return
                taken.append(connection.recv(100))
                connection.close()

        server = threading.Thread(target=drop)
        server.start()
        api = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: api}), pytest.raises(ConnectionError):
            prefect_server("refresh/online")(Wish(log="a log"))
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
    assert len(taken) == 1, taken
