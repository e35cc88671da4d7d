"""The trigger's states: durable, and honest about runs that were killed, here or on another host."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert, update

from infra.database import Database
from infra.tables import trigger_run
from infra.trigger_store import LastLook, TriggerStore
from infra.triggers import Due, Fallen, Fell, Looked, Ok, Recovered, Retry, Running
from tests.infra.rows import running_python

RETRY = Retry(first_s=60, most_s=500)
FELL = Fell(draft=3, promised=1.7, served=1.1, now_ms=1)
LOOK = LastLook(at_ms=5, min_rows=180, wanted={"code": 60}, interval_s=None, interval_from_ms=0)
ELSEWHERE = "another-boot pid:[1] 1"
HOLD = """
import sys, time
from infra.trigger_store import TriggerStore
from infra.triggers import Retry
from tests.infra.rows import address
with TriggerStore(address(sys.argv[1])).run(Retry(first_s=60, most_s=500)):
    print("runs", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def trigger(place: Path | str) -> TriggerStore:
    return TriggerStore(place)


@pytest.fixture
def database(place: Path | str) -> Iterator[Database]:
    yield (database := Database(place))
    database.close()


def test_what_fell_is_told_once_to_who_asks_and_stays_for_the_next_process(trigger, place) -> None:
    assert isinstance(trigger.tell({"code": FELL})["code"], Fallen)
    assert trigger.tell({"code": FELL, "chat": Recovered()}) == {}
    again = TriggerStore(place)
    assert again.state().domains.keys() == {"code"}
    assert again.tell({"code": Recovered()}) == {"code": Ok()}
    assert again.state().domains == {}


def test_a_run_acknowledges_what_fell_before_it_and_not_what_falls_meanwhile(trigger: TriggerStore) -> None:
    trigger.tell({"code": FELL})
    wish = trigger.wish()
    with trigger.run(RETRY) as end:
        trigger.tell({"chat": FELL})
        seen = trigger.state()
        assert (seen.running, type(seen.domains["code"]), type(seen.domains["chat"])) == (True, Running, Fallen)
        assert trigger.wish().key != wish.key
        end("promoted", "promoted")
        assert trigger.state().running  # until its process is done
    seen = trigger.state()
    assert (seen.running, [*seen.domains], seen.last_run.outcome) == (False, ["chat"], "promoted")


def test_a_second_run_at_the_same_time_acknowledges_nothing(trigger: TriggerStore) -> None:
    with trigger.run(RETRY):
        trigger.tell({"code": FELL})
        with trigger.run(RETRY) as end:
            end("promoted", "promoted")
        assert isinstance(trigger.state().domains["code"], Fallen)
        assert trigger.state().running


def test_a_killed_run_is_due_again(trigger: TriggerStore, place: Path | str) -> None:
    trigger.tell({"code": FELL})
    with running_python(HOLD, place) as (_, told):
        assert told == "runs"
        trigger.find_lost()
        assert isinstance(trigger.state().domains["code"], Running)
    trigger.find_lost()
    seen = trigger.state()
    assert (seen.running, seen.last_run.outcome) == (False, "lost")
    fallen = seen.domains["code"]
    assert isinstance(fallen, Fallen)
    assert (fallen.fall.attempts, fallen.fall.wait_s) == (1, 60)
    trigger.tell({"code": Looked(enough=True, now_ms=fallen.fall.wait_from_ms + 60_000)})
    assert isinstance(trigger.state().domains["code"], Due)


@pytest.mark.parametrize("left_ms", [60_000, 0])
def test_of_a_run_on_another_host_its_lease_says_whether_it_lives(trigger, database, left_ms) -> None:
    trigger.tell({"code": FELL})
    with trigger.run(RETRY):
        with database.writing() as connection:
            until_ms = database.now_ms(connection) + left_ms
            connection.execute(update(trigger_run).values(process=ELSEWHERE, lease_until_ms=until_ms))
        lives = database.is_shared and left_ms > 0  # of a file the host is this one, started again since
        trigger.find_lost()
        seen = trigger.state()
        assert (seen.running, type(seen.domains["code"])) == (lives, Running if lives else Fallen)


@pytest.mark.slow
def test_a_run_renews_its_lease(trigger: TriggerStore) -> None:
    with trigger.run(RETRY, lease_s=1.0):
        time.sleep(1.2)
        assert trigger.state().running


def test_a_run_that_another_took_for_lost_ends_nothing_of_that_one(trigger: TriggerStore, database: Database) -> None:
    with trigger.run(RETRY) as end:
        trigger.tell({"code": FELL})
        with database.writing() as connection:
            connection.execute(update(trigger_run).values(process=ELSEWHERE))
        end("promoted", "promoted")
        assert isinstance(trigger.state().domains["code"], Fallen)
        assert trigger.state().last_run.ended_ms is None
    holder = {"pid": 1, "process": ELSEWHERE, "lease_until_ms": 0}
    with pytest.raises(Exception, match="one"), database.writing() as connection:  # its lease is still there
        connection.execute(insert(trigger_run).values(holder))


def test_a_wish_is_asked_with_one_key_until_it_is_taken_or_its_run_ended(trigger: TriggerStore, tmp_path: Path) -> None:
    wish = trigger.wish()
    assert trigger.wish() == wish
    trigger.ask_anew(wish)
    trigger.ask_anew(wish)  # told twice of the same run
    assert trigger.wish().number == wish.number + 1
    assert trigger.wish().log == wish.log
    assert TriggerStore(tmp_path / "other.db").wish().key != wish.key


def test_looks_are_kept_and_soon_afterwards_the_same_one_is_covered(trigger: TriggerStore) -> None:
    trigger.note(LOOK)
    assert trigger.state().last_look == LOOK
    assert LOOK.covers(LOOK.model_copy(update={"at_ms": 5_000}))
    for other in ({"at_ms": 50_000}, {"at_ms": 4}, {"error": "refused"}):
        assert not LOOK.covers(LOOK.model_copy(update=other))
