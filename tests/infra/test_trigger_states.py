"""The trigger's file: durable, private, and honest about runs that were killed."""

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from infra.triggerfile import LastLook, TriggerFile, trigger_path
from infra.triggers import Due, Fallen, Fell, Looked, Ok, Recovered, Retry, Running
from tests.infra.rows import running_python

RETRY = Retry(first_s=60, most_s=500)
FELL = Fell(draft=3, promised=1.7, served=1.1, now_ms=1)
LOOK = LastLook(at_ms=5, min_rows=180, wanted={"code": 60}, interval_s=None, interval_from_ms=0)
HOLD = """
import sys, time
from pathlib import Path
from infra.triggerfile import TriggerFile
from infra.triggers import Retry
with TriggerFile(Path(sys.argv[1])).run(Retry(first_s=60, most_s=500)):
    print("runs", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def trigger(tmp_path: Path) -> TriggerFile:
    return TriggerFile(tmp_path / "queries.db")


def test_what_fell_is_told_once_to_who_asks_and_stays_for_the_next_process(trigger: TriggerFile) -> None:
    assert isinstance(trigger.tell({"code": FELL})["code"], Fallen)
    assert trigger.tell({"code": FELL, "chat": Recovered()}) == {}
    again = TriggerFile(trigger.path.with_name("queries.db"))
    assert again.state().domains.keys() == {"code"}
    assert again.tell({"code": Recovered()}) == {"code": Ok()}
    assert again.state().domains == {}


def test_the_file_is_the_owners_alone(trigger: TriggerFile) -> None:
    trigger.tell({"code": FELL})
    with trigger.run(RETRY):
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in trigger.path.parent.iterdir()}
    assert modes.keys() >= {"queries-trigger.db", "queries-trigger.lock"}
    assert set(modes.values()) == {0o600}


def test_a_run_acknowledges_what_fell_before_it_and_not_what_falls_meanwhile(trigger: TriggerFile) -> None:
    trigger.tell({"code": FELL})
    wish = trigger.wish()
    with trigger.run(RETRY) as end:
        trigger.tell({"chat": FELL})
        seen = trigger.state()
        assert (seen.running, type(seen.domains["code"]), type(seen.domains["chat"])) == (True, Running, Fallen)
        assert trigger.wish().key != wish.key
        end("promoted", "promoted")
    seen = trigger.state()
    assert (seen.running, seen.domains.keys()) == (False, {"chat"})
    assert seen.last_run is not None
    assert seen.last_run.outcome == "promoted"


@pytest.mark.slow
def test_a_second_run_at_the_same_time_acknowledges_nothing(trigger: TriggerFile) -> None:
    with trigger.run(RETRY):
        trigger.tell({"code": FELL})
        with trigger.run(RETRY) as end:
            end("promoted", "promoted")
        assert isinstance(trigger.state().domains["code"], Fallen)


def test_a_killed_run_is_due_again(trigger: TriggerFile) -> None:
    trigger.tell({"code": FELL})
    with running_python(HOLD, trigger.path.with_name("queries.db")) as (_, told):
        assert told == "runs"
        trigger.find_lost()
        assert isinstance(trigger.state().domains["code"], Running)
    trigger.find_lost()
    seen = trigger.state()
    assert (seen.running, seen.last_run is not None and seen.last_run.outcome) == (False, "lost")
    fallen = seen.domains["code"]
    assert isinstance(fallen, Fallen)
    assert (fallen.fall.attempts, fallen.fall.wait_s) == (1, 60)
    trigger.tell({"code": Looked(enough=True, now_ms=fallen.fall.wait_from_ms + 60_000)})
    assert isinstance(trigger.state().domains["code"], Due)


def test_a_wish_is_asked_with_one_key_until_it_is_taken_or_its_run_ended(trigger: TriggerFile) -> None:
    wish = trigger.wish()
    assert trigger.wish() == wish
    trigger.ask_anew(wish)
    trigger.ask_anew(wish)  # told twice of the same run
    assert trigger.wish().number == wish.number + 1
    assert trigger.wish().log == wish.log
    other = TriggerFile(trigger.path.with_name("other.db"))
    assert other.wish().key != wish.key


def test_looks_are_kept_and_soon_afterwards_the_same_one_is_covered(trigger: TriggerFile) -> None:
    trigger.note(LOOK)
    assert trigger.state().last_look == LOOK
    assert LOOK.covers(LOOK.model_copy(update={"at_ms": 5_000}))
    assert not LOOK.covers(LOOK.model_copy(update={"at_ms": 50_000}))
    assert not LOOK.covers(LOOK.model_copy(update={"at_ms": 4}))
    assert not LOOK.covers(LOOK.model_copy(update={"error": "refused"}))


def test_a_torn_file_is_set_aside_and_a_newer_one_is_not_touched(trigger: TriggerFile) -> None:
    trigger.tell({"code": FELL})
    trigger.path.write_bytes(b"x" * 4096)
    with pytest.raises(sqlite3.DatabaseError):
        trigger.state()
    assert trigger.tell({"code": FELL}).keys() == {"code"}
    with closing(sqlite3.connect(trigger.path)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="schema version 99, wanted at most"):
        trigger.state()


def test_it_lies_beside_its_log(tmp_path: Path) -> None:
    assert trigger_path(tmp_path / "queries.db") == tmp_path / "queries-trigger.db"
