"""Six simulated hours of bad acceptance, and whoever starts refreshes being down, busy or forgetful."""

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.querylog import QueryLog
from infra.trigger_store import WAITS_FOR_MEMORY, LastLook, Need, RunRequest, TriggerStore
from infra.triggers import Due, Fallen, Fell, Recovered, Result, Retry
from infra.versions import Version
from infra.waiting import Queue
from models.core.evaluation.gate import Evidence
from models.recipe import Recipe, load_recipe
from tasks.trigger.ask import RefreshTrigger, is_enough, prefect_server
from tests.infra.rows import row
from tests.tags import draft_tags

MINUTE_MS = 60_000
NOTHING, REFUSED, PROMOTED = ("deferred", "nothing to do"), ("failed", "refused"), ("promoted", "promoted")


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
        self.trigger = TriggerStore(self.log.database.file, lambda: self.now_ms)
        self.recipe: Recipe = load_recipe("smollm2-cpu")
        schedule = self.recipe.schedule.model_copy(update={"refresh_interval_s": None})
        self.recipe = self.recipe.model_copy(update={"schedule": schedule})
        self.retry = Retry(first_s=schedule.retry_s, most_s=schedule.max_retry_s)
        self.trigger.note(Need(gib=0.01))
        self.evidence = Evidence.start(self.recipe.num_draft_tokens)
        self.firsts: list[int] = []
        self.promised, self.draft = {"chat": 1.8, "code": 1.72}, 1
        self.asker = self.ask_with(self.recipe)
        self.num_rows = 0

    def ask_with(self, recipe: Recipe) -> RefreshTrigger:
        return RefreshTrigger(recipe, self.log, self.trigger, self.orchestrate, self.known, self.champion)

    def take_few_rows(self) -> None:
        """Let refreshes want five rows, so that days of them are simulated in seconds."""
        few = self.recipe.refresh.model_copy(update={"min_rows": 5})
        self.recipe = self.recipe.model_copy(update={"refresh": few})
        self.asker = self.ask_with(self.recipe)

    def champion(self) -> Version:
        tags = draft_tags(tau=json.dumps(self.promised))
        return Version(kind="draft", number=self.draft, sha256="a" * 64, tags=tags, created_ms=self.now_ms)

    def log_rows(self, number: int, domain: str, key: str | None = None) -> None:
        """Log rows that no service saw fall: ten drafted tokens in five steps, of which one was accepted."""
        names = (f"low-{self.num_rows + one}" for one in range(number))
        said = {"key": key, "time_ms": self.now_ms, "drafting": "head", "drafted": [2] * 5, "accepted": [1, 0, 0, 0, 0]}
        self.log.append([row(name, domain).model_copy(update=said) for name in names])
        self.num_rows += number

    def orchestrate(self, wish: RunRequest) -> bool:
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

    def asked_after(self, minutes: int, each: int = 1) -> int:
        """Let minutes pass, and return how many runs were asked for so far."""
        self.pass_minutes(minutes, each)
        return len(self.runs)

    def refresh(self, end: tuple[Result, str]) -> None:
        """Do what flow `refresh` does."""
        with self.trigger.run(self.retry) as tell:
            if end != NOTHING and (
                window := self.log.windows.claim(f"run {self.now_ms}", 2000, self.recipe.refresh.min_rows)
            ):
                self.log.windows.commit(window)
            tell(*end)

    @property
    def asked(self) -> int:
        return len(self.runs)

    @property
    def domains(self) -> dict[str, object]:
        return self.trigger.state().domains

    @property
    def look(self) -> LastLook | None:
        return self.trigger.state().last_look


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.log.close()


@pytest.mark.slow
def test_84_of_180_rows_wait_and_later_240_start_it(home: Home) -> None:
    home.serve(84)
    assert home.asked_after(30, each=10) == 0
    home.serve(240 - 84)
    assert home.asked_after(1) == 1
    assert home.asked_after(5) == 1  # the same run, until it starts or ends
    home.refresh(PROMOTED)
    assert home.asked_after(60, each=10) == 1


def test_a_flood_of_one_key_waits_for_rows_of_others_but_not_for_ever(home: Home) -> None:
    home.serve(1, key="b" * 64)
    home.serve(400, key="a" * 64)
    home.pass_minutes(50, each=10)
    look = home.look
    assert (home.asked, look.within_share, look.share_until_ms) == (0, 2, 1_700_000_000_000 + 60 * MINUTE_MS)
    home.pass_minutes(10, each=10)
    assert (home.asked, home.look.within_share) == (1, None)


def test_rows_of_others_end_the_wait_for_them(home: Home) -> None:
    home.serve(1, key="b" * 64)
    home.serve(400, key="a" * 64)
    home.pass_minutes(1)
    home.serve(99, key="b" * 64)
    assert home.asked_after(1) == 1


def test_f32_what_fell_while_the_orchestrator_is_down_starts_once_it_is_back(home: Home) -> None:
    home.up = False
    home.serve(240)
    home.pass_minutes(90, each=10)
    assert (home.look.error, home.look.error_since_ms) == ("refused", 1_700_000_000_000 + 10 * MINUTE_MS)
    home.up = True
    assert home.asked_after(1) == 1


@pytest.mark.slow
def test_f32_what_fell_while_a_refresh_runs_is_followed_by_another(home: Home) -> None:
    with home.trigger.run(home.retry) as end:
        home.serve(240)
        assert home.asked_after(10) == 0
        end(*REFUSED)
    assert home.asked_after(1) == 1


def test_a_run_that_never_started_is_asked_for_anew(home: Home) -> None:
    """As the orchestrator cancels one while another is active."""
    home.loses_runs = True
    home.serve(240)
    assert home.asked_after(3) == 3


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
    assert home.asked_after(10) == 0


def test_progress_goes_on_with_the_next_rows_and_a_run_that_did_nothing_waits(home: Home) -> None:
    home.serve(240)
    home.pass_minutes(1)
    home.refresh(("progress", "undecided"))
    assert home.asked_after(10) == 1
    home.serve(200)
    assert home.asked_after(1) == 2
    home.refresh(NOTHING)
    assert home.asked_after(4) == 2
    assert home.asked_after(1) == 3


def test_without_memory_no_refresh_is_asked_for_and_the_look_says_so(home: Home) -> None:
    schedule = home.recipe.schedule.model_copy(update={"min_free_memory_gib": 1e6})
    recipe = home.recipe.model_copy(update={"schedule": schedule})
    home.asker = home.ask_with(recipe)
    home.serve(240)
    assert home.asked_after(1) == 0
    assert isinstance(home.domains["code"], Due)
    assert home.look.short_of_memory.endswith("GiB to spare, 1000000.0 wanted")


def test_a_run_that_went_for_want_of_memory_is_asked_for_again_once_there_is_room(home: Home) -> None:
    home.log.append([row(f"chat-{one}") for one in range(240)])
    home.refresh(("deferred", WAITS_FOR_MEMORY))  # by the clock, no domain fell
    home.trigger.note(Need(gib=1e6))
    home.pass_minutes(30, each=10)
    seen = home.trigger.state()
    assert (home.asked, seen.waits_for_memory) == (0, True)
    assert seen.last_look.short_of_memory.endswith("wanted")
    home.trigger.note(Need(gib=0.01))
    assert home.asked_after(1) == 1
    home.refresh(PROMOTED)
    assert home.asked_after(30, each=10) == 1


def test_a_run_that_was_ended_for_memory_is_not_asked_for_at_once(home: Home) -> None:
    home.trigger.note(Need(gib=0.01))
    home.refresh(("deferred", WAITS_FOR_MEMORY))
    assert home.asked_after(4) == 0
    assert home.asked_after(1) == 1


def test_a_rare_domain_wants_rows_of_its_own_until_a_refresh_can_take_no_more(home: Home) -> None:
    home.serve(10)
    home.log.append([row(f"chat-{one}") for one in range(500)])
    home.pass_minutes(1)
    assert isinstance(home.domains["code"], Fallen)
    home.log.append([row(f"more-{one}") for one in range(1500)])
    assert home.asked_after(1) == 1


def test_of_rows_that_belong_together_as_many_more_are_wanted(home: Home) -> None:
    def wanted_with(size: int) -> int:
        groups = (f"{one // size:064x}" for one in range(240))
        alone = [row(f"{'single' if size == 1 else 'grouped'}-{one}", "code") for one in range(240)]
        rows = alone if size == 1 else [one.model_copy(update={"group": next(groups)}) for one in alone]
        home.log.append(rows)
        home.trigger.tell({"code": Fell(draft=1, promised=1.72, served=1.05, now_ms=home.now_ms)})
        home.pass_minutes(1)
        home.log.windows.commit(home.log.windows.claim(f"run {size}", 2000, 1))
        return home.look.wanted["code"]

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
    assert home.asked_after(6) == 2


def test_how_many_rows_are_wanted_follows_from_how_far_the_challenger_is(home: Home) -> None:
    def wanted() -> int:
        home.pass_minutes(1)
        return home.look.wanted["code"]

    home.serve(10)
    fresh = wanted()
    home.evidence = Evidence.start(home.recipe.num_draft_tokens, challenger=3)  # each is allowed a smaller error
    assert wanted() == fresh  # nothing ran, so nobody was asked again
    home.refresh(("failed", "refused"))
    third = wanted()
    home.evidence = Evidence.start(home.recipe.num_draft_tokens, challenger=3)
    home.evidence = home.evidence.model_copy(update={"test": home.evidence.test.after([0.5] * 40)})
    home.refresh(("progress", "undecided"))
    assert wanted() < fresh < third
    assert home.firsts == [1, 1, 1]


def test_where_the_registry_is_down_what_was_known_stays(home: Home) -> None:
    def unknown(first_seq: int) -> Evidence:
        raise ConnectionError("refused")

    home.asker = RefreshTrigger(home.recipe, home.log, home.trigger, home.orchestrate, unknown, home.champion)
    home.serve(240)
    assert home.asked_after(1) == 1


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
            prefect_server("refresh/online")(RunRequest(log="a log"))
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
    assert len(taken) == 1, taken


def test_a_domain_that_no_draft_has_learnt_is_due_at_once_and_once(home: Home) -> None:
    home.log_rows(home.recipe.refresh.min_rows - 1, "sql")
    home.pass_minutes(30, each=10)
    assert (home.asked, home.domains) == (0, {})
    home.log_rows(1, "sql")
    assert home.asked_after(1) == 1
    assert isinstance(home.domains["sql"], Due)
    assert home.domains["sql"].fall.told("sql") == "sql has τ 1.20, 1.76 is usual"
    home.draft, home.promised = 2, {**home.promised, "sql": 1.5}
    home.refresh(PROMOTED)
    for _ in range(20):
        home.log_rows(200, "sql")
        home.pass_minutes(10, each=5)
    assert (home.asked, home.domains) == (1, {})


def test_a_domain_of_which_far_less_is_promised_than_of_others_is_due_too(home: Home) -> None:
    home.promised |= {"sql": 1.3, "math": 1.5}
    home.log_rows(200, "math")
    assert home.asked_after(1) == 0
    home.log_rows(200, "sql")
    home.pass_minutes(1)
    assert isinstance(home.domains["sql"], Due)
    assert home.asked == 1


@pytest.mark.parametrize("end", [REFUSED, PROMOTED])
def test_a_domain_that_no_refresh_helps_waits_twice_as_long_each_time(home: Home, end: tuple[Result, str]) -> None:
    """A refresh may be promoted for what it brought elsewhere."""
    home.take_few_rows()
    for minute in range(0, 60 * 5, 3):
        home.log_rows(5, "noise")
        home.pass_minutes(3, each=3)
        if len(home.runs) > len(home.minutes):
            home.minutes.append(minute)
            home.draft += end == PROMOTED
            home.refresh(end)
    waits = [after - before for before, after in pairwise(home.minutes)]
    assert waits == pytest.approx([6, 10, 20, 40, 80], abs=3)


def test_a_client_that_makes_up_names_starts_no_more_refreshes_than_with_one(home: Home) -> None:
    """For two days the rows of a refresh come under a new name every ten minutes; none helps."""
    home.take_few_rows()
    for number in range(2 * 24 * 6):
        home.log_rows(5, f"name-{number}")
        home.pass_minutes(10, each=10)
        if len(home.runs) > len(home.minutes):
            home.minutes.append(10 * number)
            home.refresh(REFUSED)
    print(f"refreshes in two days: {home.asked}, minutes: {home.minutes}")
    assert home.asked <= 15
    assert home.minutes[-1] - home.minutes[-2] >= 360
    assert len(home.domains) <= 15
    home.pass_minutes(60 * 6, each=60)
    home.refresh(REFUSED)
    home.pass_minutes(60 * 7, each=60)
    assert home.domains == {}  # they are forgotten with their rows


def test_a_name_that_comes_while_a_refresh_runs_waits_like_the_one_that_it_did_not_help(home: Home) -> None:
    home.take_few_rows()
    home.log_rows(5, "sql")
    home.pass_minutes(1)
    with home.trigger.run(home.retry) as tell:
        home.log.windows.commit(home.log.windows.claim("run", 2000, 5))
        home.log_rows(5, "math")
        home.pass_minutes(1)
        tell(*REFUSED)
    assert home.asked_after(4) == 1
    assert home.asked_after(2) == 2
    assert isinstance(home.domains["math"], Due)
    assert home.domains["math"].fall.attempts == 1


def test_rows_of_one_key_make_no_domain_due_before_rows_of_others_come(home: Home) -> None:
    home.log_rows(1, "chat", key="b" * 64)
    home.log_rows(400, "sql", key="a" * 64)
    assert home.asked_after(50, each=10) == 0
    home.log_rows(90, "chat", key="b" * 64)
    assert home.asked_after(1) == 1


def test_where_the_registry_is_down_no_domain_is_found_low_and_one_that_fell_is_asked_for(home: Home) -> None:
    def unknown() -> Version:
        raise ConnectionError("refused")

    home.asker = RefreshTrigger(home.recipe, home.log, home.trigger, home.orchestrate, home.known, unknown)
    home.log_rows(240, "sql")
    home.pass_minutes(1)
    assert home.domains == {}
    home.serve(240)
    assert home.asked_after(1) == 1
    assert "sql" not in home.domains


def test_a_refresh_is_asked_for_at_each_interval_and_none_while_one_runs(home: Home) -> None:
    schedule = home.recipe.schedule.model_copy(update={"refresh_interval_s": 3600.0})
    home.asker = home.ask_with(home.recipe.model_copy(update={"schedule": schedule}))
    assert (home.asked_after(59), home.asked_after(1), home.asked_after(5)) == (0, 1, 1)  # which has not begun yet
    with home.trigger.run(home.retry) as tell:
        assert home.asked_after(90) == 1
        tell(*NOTHING)
    assert home.asked_after(1) == 2  # an hour after the last one began, it is over
    home.refresh(NOTHING)
    assert (home.asked_after(59), home.asked_after(1)) == (2, 3)
    home.refresh(NOTHING)
    home.now_ms -= 24 * 60 * MINUTE_MS  # a clock that is set makes one more at most
    home.asked_after(1)
    home.refresh(NOTHING)
    assert home.asked_after(50) == 4
