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

from infra import priority
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

MINUTE_MS, BEGIN_MS = 60_000, 1_700_000_000_000
NOTHING, REFUSED, PROMOTED = ("deferred", "nothing to do"), ("failed", "refused"), ("promoted", "promoted")


@dataclass
class Home:
    """A log, a trigger on a clock that stands still, and an orchestrator that makes one run of a wish."""

    folder: Path
    now_ms: int = BEGIN_MS
    up: bool = True
    loses_runs: bool = False
    knows: bool = True
    runs: list[str] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    num_rows: int = 0
    draft: int = 1

    def __post_init__(self) -> None:
        self.log = QueryLog(self.folder / "queries.db")
        self.trigger = TriggerStore(self.log.database.file, lambda: self.now_ms)
        self.recipe: Recipe = load_recipe("smollm2-cpu")
        self.ask_with("schedule", refresh_interval_s=None)
        schedule = self.recipe.schedule
        self.retry = Retry(first_s=schedule.retry_s, most_s=schedule.max_retry_s)
        self.trigger.note(Need(gib=0.01))
        self.evidence = Evidence.start(self.recipe.num_draft_tokens)
        self.promised = {"chat": 1.8, "code": 1.72}

    def ask_with(self, table: str, **changed: object) -> None:
        """Look from now on with a recipe of which keys of a table are others."""
        new = getattr(self.recipe, table).model_copy(update=changed)
        self.recipe = self.recipe.model_copy(update={table: new})
        given = (self.recipe, self.log, self.trigger, self.orchestrate, self.known, self.champion)
        self.asker = RefreshTrigger(*given)

    def take_few_rows(self) -> None:
        """Let refreshes want five rows, so that days of them are simulated in seconds."""
        self.ask_with("refresh", min_rows=5)

    def champion(self) -> Version:
        if not self.knows:
            raise ConnectionError("refused")
        tags = draft_tags(tau=json.dumps(self.promised))
        return Version(kind="draft", number=self.draft, sha256="a" * 64, tags=tags, created_ms=self.now_ms)

    def known(self, first_seq: int) -> Evidence:
        if not self.knows:
            raise ConnectionError("refused")
        self.firsts.append(first_seq)
        return self.evidence

    def orchestrate(self, wish: RunRequest) -> bool:
        if not self.up:
            raise ConnectionError("refused")
        if wish.key not in self.runs:
            self.runs.append(wish.key)
        return self.loses_runs

    def add_rows(self, number: int, domain: str, **said: object) -> None:
        names = (f"row-{self.num_rows + one}" for one in range(number))
        self.log.append([row(name, domain).model_copy(update=said) for name in names])
        self.num_rows += number

    def log_rows(self, number: int, domain: str, key: str | None = None) -> None:
        """Log rows that no service saw fall: ten drafted tokens in five steps, of which one was accepted."""
        steps = {"drafting": "head", "drafted": [2] * 5, "accepted": [1, 0, 0, 0, 0]}
        self.add_rows(number, domain, key=key, time_ms=self.now_ms, **steps)

    def serve(self, number: int, domain: str = "code", key: str | None = None) -> None:
        """Log rows of a domain that the service sees fall."""
        self.add_rows(number, domain, **({"key": key, "time_ms": self.now_ms} if key else {}))
        self.trigger.tell({domain: Fell(draft=1, promised=1.72, served=1.05, now_ms=self.now_ms)})

    def pass_minutes(self, number: int, each: int = 1) -> None:
        for _ in range(0, number, each):
            self.now_ms += each * MINUTE_MS
            self.asker.look()

    def asked_after(self, minutes: int, each: int = 1) -> int:
        """Let minutes pass, and return how many runs were asked for so far."""
        self.pass_minutes(minutes, each)
        return self.asked

    def refresh(self, end: tuple[Result, str]) -> None:
        """Do what flow `refresh` does."""
        with self.trigger.run(self.retry) as tell:
            min_rows = self.recipe.refresh.min_rows
            if end != NOTHING and (window := self.log.windows.claim(f"run {self.now_ms}", 2000, min_rows)):
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
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setattr(priority, "TRAINER_ENDS_AT", 1.0)  # or who else uses the machine's memory would decide
    made = Home(tmp_path)
    made.ask_with("schedule", min_free_memory_gib=0.0)
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
    assert home.asked_after(50, each=10) == 0
    assert (home.look.within_share, home.look.share_until_ms) == (2, BEGIN_MS + 60 * MINUTE_MS)
    assert (home.asked_after(10, each=10), home.look.within_share) == (1, None)


def test_rows_of_others_end_the_wait_for_them(home: Home) -> None:
    home.serve(1, key="b" * 64)
    home.serve(400, key="a" * 64)
    assert home.asked_after(1) == 0
    home.serve(99, key="b" * 64)
    assert home.asked_after(1) == 1


def test_f32_what_fell_while_the_orchestrator_is_down_starts_once_it_is_back(home: Home) -> None:
    home.up = False
    home.serve(240)
    assert home.asked_after(90, each=10) == 0
    assert (home.look.error, home.look.error_since_ms) == ("refused", BEGIN_MS + 10 * MINUTE_MS)
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
        if home.asked_after(4, each=4) > len(starts):
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
    home.add_rows(200, "code")
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
    home.ask_with("schedule", min_free_memory_gib=1e6)
    home.serve(240)
    assert home.asked_after(1) == 0
    assert isinstance(home.domains["code"], Due)
    assert home.look.short_of_memory.endswith("GiB to spare, 1000000.0 wanted")


def test_a_run_that_went_for_want_of_memory_is_asked_for_again_once_there_is_room(home: Home) -> None:
    home.add_rows(240, "chat")
    home.refresh(("deferred", WAITS_FOR_MEMORY))  # by the clock, no domain fell
    home.trigger.note(Need(gib=1e6))
    assert home.asked_after(30, each=10) == 0
    assert home.trigger.state().waits_for_memory and home.look.short_of_memory.endswith("wanted")
    home.trigger.note(Need(gib=0.01))
    assert home.asked_after(1) == 1
    home.refresh(PROMOTED)
    assert home.asked_after(30, each=10) == 1


def test_a_run_that_was_ended_for_memory_is_not_asked_for_at_once(home: Home) -> None:
    home.refresh(("deferred", WAITS_FOR_MEMORY))
    assert (home.asked_after(4), home.asked_after(1)) == (0, 1)


def test_a_rare_domain_wants_rows_of_its_own_until_a_refresh_can_take_no_more(home: Home) -> None:
    home.serve(10)
    home.add_rows(500, "chat")
    home.pass_minutes(1)
    assert isinstance(home.domains["code"], Fallen)
    home.add_rows(1500, "chat")
    assert home.asked_after(1) == 1


def test_of_rows_that_belong_together_as_many_more_are_wanted(home: Home) -> None:
    def wanted_with(*groups: str | None) -> int:
        for group in groups:
            home.add_rows(240 // len(groups), "code", group=group)
        home.serve(0)
        home.pass_minutes(1)
        home.log.windows.commit(home.log.windows.claim(f"run of {len(groups)}", 2000, 1))
        return home.look.wanted["code"]

    alone, of_eight = wanted_with(None), wanted_with(*(f"{group:064x}" for group in range(30)))
    assert 5 * alone < of_eight < 9 * alone


def test_where_domains_are_not_told_apart_all_rows_count(home: Home) -> None:
    home.add_rows(240, "chat")
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


@pytest.mark.slow
@pytest.mark.parametrize("end", [REFUSED, PROMOTED])
def test_a_domain_that_no_refresh_helps_waits_twice_as_long_each_time(home: Home, end: tuple[Result, str]) -> None:
    """A refresh may be promoted for what it brought elsewhere."""
    home.take_few_rows()
    asked_at = []
    for minute in range(0, 60 * 5, 3):
        home.log_rows(5, "noise")
        if home.asked_after(3, each=3) > len(asked_at):
            asked_at.append(minute)
            home.draft += end == PROMOTED
            home.refresh(end)
    waits = [after - before for before, after in pairwise(asked_at)]
    assert waits == pytest.approx([6, 10, 20, 40, 80], abs=3)


@pytest.mark.slow
def test_a_client_that_makes_up_names_starts_no_more_refreshes_than_with_one(home: Home) -> None:
    """For two days the rows of a refresh come under a new name every ten minutes; none helps."""
    home.take_few_rows()
    asked_at = []
    for minute in range(0, 2 * 24 * 60, 10):
        home.log_rows(5, f"name-{minute}")
        if home.asked_after(10, each=10) > len(asked_at):
            asked_at.append(minute)
            home.refresh(REFUSED)
    print(f"refreshes in two days: {home.asked}, minutes: {asked_at}")
    assert home.asked <= 15
    assert asked_at[-1] - asked_at[-2] >= 360
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
    home.knows = False
    home.log_rows(240, "sql")
    home.pass_minutes(1)
    assert home.domains == {}
    home.serve(240)
    assert home.asked_after(1) == 1
    assert "sql" not in home.domains


@pytest.mark.slow
def test_a_refresh_is_asked_for_at_each_interval_and_none_while_one_runs(home: Home) -> None:
    home.ask_with("schedule", refresh_interval_s=3600.0)
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
