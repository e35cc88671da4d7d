"""Of several servers one tries a draft first, and the rest get it once it was proven there."""

from dataclasses import replace
from pathlib import Path

import pytest

from services.attach import Rollout, RolloutFile
from services.drafts import DraftHistory, DraftState, label
from tests.services.test_swap import PROOF, draft, version

A, B, C = SERVERS = ("http://a", "http://b", "http://c")
BEGUN = Rollout(rows=()).listed(SERVERS)
OLD, NEW = (label(version(number)) for number in (1, 2))


def unproven(number: int) -> DraftState:
    return DraftState.started(draft(number), DraftHistory())


def serves(number: int) -> DraftState:
    return replace(unproven(number), proof=PROOF)


def tries(number: int, serving: int) -> DraftState:
    return replace(serves(serving), candidate=draft(number))


def seen(rollout: Rollout, **states: DraftState | None) -> Rollout:
    for name, state in states.items():
        rollout = rollout.saw(f"http://{name}", state)
    return rollout


def may_take(rollout: Rollout, name: str) -> str:
    return "".join(server[-1] for server in SERVERS if rollout.may_take(server, name))


def saw(file: RolloutFile, server: str, state: DraftState) -> None:
    file.become(file.rollout.listed(SERVERS).saw(server, state))


def told(rollout: Rollout) -> list[tuple[str, int, str]]:
    return [(row.server[-1], row.wave, row.state) for row in rollout.rows]


def test_the_first_server_takes_a_new_draft_and_the_rest_once_it_is_proven_there() -> None:
    assert not BEGUN.is_followed
    begun = seen(BEGUN, b=unproven(1), a=serves(1), c=serves(1))
    assert begun.is_followed
    assert (may_take(begun, OLD), may_take(begun, NEW)) == ("abc", "a")
    trying = seen(begun, a=tries(2, serving=1))
    assert may_take(trying, NEW) == "a"
    assert [(row.state, row.wave, row.version) for row in trying.rows] == [("serving", at, OLD) for at in (0, 1, 1)]
    proven = seen(trying, a=serves(2))
    assert (may_take(proven, NEW), may_take(proven, OLD)) == ("abc", "abc")  # the way back has no waves


def test_a_server_keeps_the_name_that_rows_have_while_it_is_away() -> None:
    away = BEGUN.saw(A, serves(1), "host:1").saw(A, None)
    assert [(row.state, row.name) for row in away.rows] == [("away", "host:1"), ("starting", ""), ("starting", "")]


def test_a_draft_that_a_server_was_started_with_is_proven_by_nothing() -> None:
    assert may_take(seen(BEGUN, a=unproven(2)), NEW) == "a"


def test_a_draft_that_fails_on_the_first_server_never_gets_to_the_rest() -> None:
    failed = seen(BEGUN, a=serves(1), b=serves(1), c=serves(1))
    failed = seen(seen(failed, a=tries(2, serving=1)), a=serves(1))
    assert may_take(failed, NEW) == "a"


def test_where_the_first_server_is_away_the_next_one_tries() -> None:
    away = seen(BEGUN, b=serves(1), a=None)
    assert may_take(away, NEW) == "b"
    assert may_take(seen(away, b=None, c=serves(1)), NEW) == "c"
    assert may_take(seen(away, a=serves(1)), NEW) == "a"
    assert may_take(seen(away, b=None, c=None), NEW) == ""


def test_a_server_that_joins_comes_last_and_gets_what_was_proven() -> None:
    joined = seen(Rollout(rows=()).listed([B]), b=serves(1)).listed([A, B])
    assert told(joined) == [("b", 0, "serving"), ("a", 1, "starting")]
    assert (may_take(joined, OLD), may_take(joined, NEW)) == ("abc", "b")
    assert told(seen(joined, b=None)) == [("b", 1, "away"), ("a", 0, "starting")]
    assert joined.listed([A, B]) == joined


def test_a_server_that_leaves_is_forgotten_and_the_next_one_tries() -> None:
    left = seen(BEGUN, a=tries(2, serving=1), b=serves(1), c=None).listed([B, C])
    assert told(left) == [("b", 0, "serving"), ("c", 1, "away")]
    assert (may_take(left, OLD), may_take(left, NEW)) == ("abc", "b")
    assert told(left.listed(SERVERS)) == [("b", 0, "serving"), ("c", 1, "away"), ("a", 1, "starting")]
    replaced = left.listed([A])
    assert told(replaced) == [("a", 0, "starting")] and not replaced.is_followed


@pytest.mark.parametrize("damaged", [False, True])
def test_what_was_proven_outlives_a_restart_and_damage_does_not_stop_one(tmp_path: Path, damaged: bool) -> None:
    file = tmp_path / "home" / "rollout.json"
    saw(RolloutFile(file), A, serves(2))
    if damaged:
        file.write_text("{")
    again = RolloutFile(file)
    again.become(again.rollout.listed(SERVERS))
    assert may_take(again.rollout, NEW) == ("a" if damaged else "abc")
    saw(again, B, serves(1))
    assert may_take(RolloutFile(file).rollout.listed(SERVERS), OLD) == "abc"


def test_a_disk_that_takes_nothing_stops_no_rollout(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    full = RolloutFile(tmp_path / "file" / "rollout.json")
    saw(full, A, serves(2))
    assert may_take(full.rollout, NEW) == "abc"
