"""Of many replicas one tries a draft first, and the rest get it in waves; a draft that is bad stops early, everywhere.

The second part plays fleets by chance, whose truth is known: which drafts are bad, and which replicas fail whatever
they load. After each event the state is read from what would be kept of it, as by another process.
"""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.rollouts import (
    CANARY,
    Away,
    Cleared,
    Event,
    Fleet,
    Joined,
    Left,
    Loading,
    Lost,
    Named,
    NeedsStart,
    Passed,
    Seen,
    Told,
    step,
)
from models.types import RolloutParams

PARAMS = RolloutParams(waves=(0.5, 1.0), pause_s=10, test_s=100)
OLD, NEW = "1-old", "2-new"
FAULT = "fc.weight holds NaN"


def after(fleet: Fleet, *events: Event, now_s: float = 0.0, params: RolloutParams = PARAMS) -> Fleet:
    for event in events:
        kept = Fleet.model_validate_json(fleet.model_dump_json())
        fleet = step(kept, event, params, int(now_s * 1000))
    return fleet


def serves(name: str, draft: str = OLD, proven: bool = True, why: str = "") -> Seen:
    return Seen(name=name, version=draft, proven=proven, failed={NEW: why} if why else {})


def fails(name: str, control: bool | None = None) -> Seen:
    """Return what a replica says in which a draft failed, and then its last good one, the control, if there was one."""
    controls = {} if control is None else {NEW: control}
    return serves(name, why=FAULT).model_copy(update={"controls": controls})


def fleet_of(names: str) -> Fleet:
    """Return a fleet of replicas with names of one letter, that all serve a good draft."""
    return after(Fleet(good=(OLD,)), Joined(names=tuple(names)), *map(serves, names), Named(champion=OLD))


def may_load(fleet: Fleet, draft: str = NEW) -> str:
    return "".join(row.name for row in fleet.rows if fleet.may_load(row.name, draft))


def waves(fleet: Fleet) -> str:
    return " ".join(f"{row.name}{row.wave}" for row in fleet.rows)


def test_the_canary_gets_a_champion_first_then_waves_with_a_pause_after_each() -> None:
    begun = after(fleet_of("abcde"), Named(champion=NEW))
    assert (waves(begun), may_load(begun)) == ("a0 b1 c1 d2 e2", "a")
    assert may_load(begun, OLD) == "abcde"  # the way back has no waves
    proven = after(begun, Loading(name="a", draft=NEW), serves("a", NEW), Passed(draft=NEW), now_s=20)
    assert (may_load(proven), proven.through_ms) == ("a", 20_000)
    assert may_load(after(proven, serves("b"), now_s=29)) == "a"
    opened = after(proven, serves("b"), now_s=30)
    assert (opened.wave, may_load(opened)) == (1, "abc")
    half = after(opened, serves("b", NEW), now_s=50)
    assert may_load(after(half, serves("b", NEW), now_s=500)) == "abc"  # c is waited for
    second = after(after(half, serves("c", NEW), now_s=51), serves("c", NEW), now_s=61)
    assert may_load(second) == "abcde"
    ended = after(second, serves("d", NEW), serves("e", NEW))
    assert (ended.good, ended.candidate, may_load(ended)) == ((NEW, OLD), "", "abcde")


@pytest.mark.parametrize(("at_s", "opened"), [(99, "a"), (100, "abc")])
def test_the_post_promotion_test_is_waited_for_and_not_for_ever(at_s: float, opened: str) -> None:
    proven = after(fleet_of("abc"), Named(champion=NEW), serves("a", NEW), Passed(draft=OLD))
    assert "waits for the post-promotion test" in proven.told()
    assert may_load(after(proven, serves("b"), now_s=at_s)) == ("a" if opened == "a" else "ab")


def test_a_draft_that_fails_the_test_is_gone_back_from_before_any_other_replica_loads_it() -> None:
    proven = after(fleet_of("abc"), Named(champion=NEW), serves("a", NEW))
    reverted = after(proven, Named(champion=OLD), Passed(draft=NEW), now_s=500)
    assert (reverted.candidate, may_load(reverted), may_load(reverted, OLD)) == ("", "", "abc")


def test_where_the_last_good_draft_passes_right_after_the_candidate_is_refused_and_no_other_replica_loads_it() -> None:
    refused = after(fleet_of("abcde"), Named(champion=NEW), fails("a", control=True))
    why = f"failed where the last good draft passed right after: {FAULT}"
    assert (refused.refused, refused.untold, refused.candidate) == ({NEW: why}, (NEW,), "")
    assert (may_load(refused), may_load(refused, OLD)) == ("", "abcde")
    alone = after(fleet_of("a"), Named(champion=NEW), fails("a", control=True))
    assert alone.refused == {NEW: why}


def test_a_canary_that_fails_its_last_good_draft_too_leaves_and_the_draft_reaches_all_others() -> None:
    sick = after(fleet_of("abcdef"), Named(champion=NEW), fails("a", control=False))
    assert (waves(sick)[:5], may_load(sick), sick.refused) == ("a0 b0", "b", {})
    has = after(sick, serves("b", NEW), Passed(draft=NEW))
    opened = after(has, serves("c"), now_s=10)
    assert (may_load(opened), "1 left" in opened.told()) == ("bc", True)
    left = after(opened, fails("c", control=False), serves("d"), now_s=30)
    ended = after(left, *(serves(name, NEW) for name in "def"), now_s=50)
    assert (ended.good, ended.refused, may_load(ended)) == ((NEW, OLD), {}, "bdef")


def test_of_two_replicas_that_both_break_by_a_draft_no_third_loads_it() -> None:
    broken = after(fleet_of("abc"), Named(champion=NEW), fails("a", control=False), fails("b", control=False))
    assert (may_load(broken), broken.refused) == ("", {NEW: f"2 of 2 replicas failed: {FAULT}"})


def test_a_sick_replica_alone_blames_no_draft_and_tries_it_again_when_it_was_started_anew() -> None:
    sick = after(fleet_of("a"), Named(champion=NEW), fails("a", control=False))
    assert (may_load(sick), sick.refused, may_load(sick, OLD)) == ("", {}, "a")
    again = after(sick, Lost(names=("a",)), Joined(names=("b",)), serves("b"))
    assert may_load(again) == "b"


def test_in_waves_a_draft_is_refused_by_the_replicas_that_are_not_sick() -> None:
    opened = after(fleet_of("abcdef"), Named(champion=NEW), serves("a", NEW), Passed(draft=NEW))
    opened = after(opened, serves("b"), now_s=10)
    assert may_load(opened) == "abc"
    one = after(opened, fails("b", control=True), fails("c", control=False), now_s=20)
    assert one.refused == after(one, Lost(names=("a",))).refused == {}
    second = after(one, serves("d"), now_s=30)
    assert may_load(second) == "adef"
    two = after(second, fails("d", control=True))
    assert two.refused == {}  # two of five that can tell
    assert after(two, fails("e", control=True)).refused == {NEW: f"3 of 5 replicas failed: {FAULT}"}


def test_a_draft_that_breaks_most_replicas_of_its_waves_is_refused_though_each_fails_its_control() -> None:
    opened = after(fleet_of("abcd"), Named(champion=NEW), serves("a", NEW), Passed(draft=NEW))
    one = after(after(opened, serves("b"), now_s=10), fails("b", control=False))
    two = after(after(one, serves("c"), now_s=30), fails("c", control=False))
    assert (one.refused, two.refused) == ({}, {})  # two of four
    assert (
        after(after(two, serves("d"), now_s=50), fails("d", control=False))
        .refused[NEW]
        .startswith("3 of 4 replicas left")
    )


def test_where_nothing_tells_a_canary_from_its_draft_one_more_replica_does() -> None:
    failed = after(fleet_of("abcde"), Named(champion=NEW), fails("a"))
    assert (waves(failed)[:5], may_load(failed), failed.refused) == ("a0 b0", "b", {})
    fault = after(failed, fails("b"))
    assert (may_load(fault), may_load(fault, OLD)) == ("", "abcde")
    assert (fault.refused, fault.untold) == ({NEW: f"2 of 2 replicas failed: {FAULT}"}, (NEW,))
    sick = after(failed, serves("b", NEW), Passed(draft=NEW))
    assert may_load(after(sick, serves("c"), now_s=10)) == "bc"  # a has left the rollout


def test_a_replica_that_fails_alone_leaves_and_a_quorum_of_failures_refuses_the_draft() -> None:
    opened = after(fleet_of("abcdef"), Named(champion=NEW), serves("a", NEW), Passed(draft=NEW))
    opened = after(opened, serves("b"), now_s=10)
    alone = after(opened, fails("b"), serves("c", NEW), now_s=20)
    assert (alone.refused, "1 left" in alone.told()) == ({}, True)
    again = after(alone, serves("d"), now_s=30)
    assert may_load(again) == "acdef"
    two = after(again, fails("d"), fails("e"))
    assert two.refused == {}  # three of six are no more than half
    assert NEW in after(two, fails("f")).refused


def test_of_one_replica_alone_its_failure_refuses_the_draft() -> None:
    assert after(fleet_of("a"), Named(champion=NEW), fails("a")).refused == {NEW: FAULT}
    good = after(fleet_of("a"), Named(champion=NEW), serves("a", NEW))
    assert good.good == (NEW, OLD)  # for nobody else is left to be protected


def test_a_draft_that_its_replicas_die_of_is_loaded_by_two_of_them_at_most() -> None:
    begun = after(fleet_of("abcd"), Named(champion=NEW), Loading(name="a", draft=NEW), Lost(names=("a",)))
    assert (may_load(begun), begun.refused) == ("b", {})
    ended = after(begun, Joined(names=("e",)), serves("e"), Loading(name="b", draft=NEW), Lost(names=("b",)))
    assert (may_load(ended), [*ended.refused]) == ("", [NEW])
    idle = after(fleet_of("abcd"), Named(champion=NEW), Lost(names=("a",)), Lost(names=("b",)))
    assert (may_load(idle), idle.refused) == ("c", {})  # they had not begun


def test_a_server_that_goes_away_while_it_loads_is_passed_over_and_tries_again_if_there_is_no_other() -> None:
    away = after(fleet_of("ab"), Named(champion=NEW), Loading(name="a", draft=NEW), Away(name="a"))
    assert may_load(away) == "b"
    assert may_load(after(away, serves("a"))) == "b"
    alone = after(fleet_of("a"), Named(champion=NEW), Loading(name="a", draft=NEW), Away(name="a"))
    assert (may_load(after(alone, serves("a"))), alone.refused) == ("a", {})


def test_where_the_canary_is_away_the_next_replica_is_it_and_who_comes_back_waits_its_turn() -> None:
    begun = after(fleet_of("abc"), Away(name="a"), Named(champion=NEW))
    assert (may_load(begun), begun.leader) == ("b", "b")
    assert may_load(after(begun, serves("a"))) == "b"
    assert may_load(after(begun, Away(name="b"), Away(name="c"))) == ""
    tested = after(begun, serves("b", NEW), Passed(draft=NEW), serves("c"), now_s=10)
    behind = after(tested, Away(name="c"), serves("a"), serves("c"))
    assert "c2" in waves(behind)


def test_a_replica_that_joins_comes_last_and_gets_what_is_good_at_once() -> None:
    joined = after(fleet_of("abc"), Named(champion=NEW), Joined(names=("d", "a")))
    assert (waves(joined).split()[-1], may_load(joined), may_load(joined, OLD)) == ("d2", "a", "abcd")
    left = after(joined, Left(names=("a",)))
    assert may_load(left) == "b"


def test_a_replica_that_starts_where_nothing_was_ever_good_starts_with_the_champion() -> None:
    assert Fleet().may_load("a", NEW)
    assert not Fleet(good=(OLD,)).may_load("a", NEW) and not Fleet(refused={NEW: FAULT}).may_load("a", NEW)
    started = after(Fleet(), Joined(names=("a", "b")), serves("a", OLD, proven=False), Named(champion=OLD))
    assert (started.good, may_load(started, OLD)) == ((), "a")
    assert after(started, serves("b", OLD), serves("a", OLD)).good == (OLD,)


def test_a_newer_champion_begins_its_own_rollout() -> None:
    opened = after(fleet_of("abc"), Named(champion=NEW), serves("a", NEW), Passed(draft=NEW))
    newer = after(opened, Named(champion="3-newer"), now_s=99)
    assert (newer.wave, newer.tested, may_load(newer, "3-newer"), may_load(newer, NEW)) == (CANARY, False, "a", "")


def test_a_refused_draft_is_tried_again_when_its_quarantine_was_cleared_after_the_registry_knew() -> None:
    refused = after(fleet_of("ab"), Named(champion=NEW), fails("a"), fails("b"))
    assert after(refused, Cleared(draft=NEW)).refused  # the registry was not told yet
    told = after(refused, Told(draft=NEW), serves("a"), serves("b"), Named(champion=NEW))
    assert (may_load(told), told.candidate) == ("", "")
    assert may_load(after(told, Cleared(draft=NEW), Named(champion=NEW))) == "a"


def test_a_draft_that_running_engines_cant_load_waits_until_all_replicas_start_with_it() -> None:
    waits = after(
        fleet_of("abc"), Named(champion=NEW), Loading(name="a", draft=NEW), NeedsStart(draft=NEW), serves("a")
    )
    assert (may_load(waits), waits.refused, waits.lost) == ("", {}, {})
    assert not after(waits, Lost(names=("a",))).may_load("d", NEW)  # the others serve what they have
    stopped = after(waits, Left(names=("a", "b", "c")))
    assert stopped.may_load("d", NEW)
    started = after(stopped, Joined(names=("d", "e")), serves("d", NEW), serves("e", "", proven=False))
    assert started.may_load("f", NEW) and not after(started, serves("e")).may_load("f", NEW)
    assert after(started, serves("e", NEW)).good == (NEW, OLD)


def test_when_nobody_is_left_who_has_a_draft_a_canary_tries_it_again() -> None:
    opened = after(fleet_of("abcdefgh"), Named(champion=NEW), serves("a", NEW), Passed(draft=NEW))
    opened = after(opened, serves("b", NEW), now_s=10)
    assert (opened.wave, may_load(opened)) == (1, "abcd")
    again = after(opened, Lost(names=("a", "b")), serves("c"), now_s=11)
    assert (again.wave, may_load(again), may_load(again, OLD)) == (CANARY, "c", "cdefgh")


@pytest.mark.parametrize("shares", [(), (0.5,), (0.5, 0.5, 1.0), (0.0, 1.0), (1.0, 0.5), (0.5, 1.5)])
def test_waves_that_do_not_grow_to_all_replicas_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="wanted shares that grow from above 0 to 1"):
        RolloutParams(waves=shares)


class Played:
    """A fleet, the registry that it follows, and what its replicas did."""

    def __init__(self, num: int, bad: set[str], sick: set[int]) -> None:
        self.bad, self.sick, self.now_s = bad, sick, 0.0
        self.fleet, self.promoted, self.num_named = Fleet(good=(OLD,)), [OLD], 0
        self.names: dict[int, str] = {}
        self.serving: dict[str, str] = {}
        self.failed: dict[str, dict[str, str]] = {}
        self.control: dict[str, str] = {}  # of which draft it is not told yet that it failed
        self.controls: dict[str, dict[str, bool]] = {}
        self.loading: dict[str, str] = {}
        self.loads: list[tuple[str, str, int]] = []
        for place in range(num):
            self.join(place)

    def tell(self, event: Event) -> None:
        before = self.fleet
        self.fleet = after(before, event, now_s=self.now_s)
        rows = self.fleet.rows
        if candidate := self.fleet.candidate:
            open_now = {row.wave for row in rows if self.fleet.may_load(row.name, candidate) and not row.has(candidate)}
            assert open_now <= {self.fleet.wave}  # never two waves at once
            assert (
                self.fleet.wave
                or len([row for row in rows if row.wave == CANARY and not self.fleet.is_through(row)]) <= 1
            )
        assert not {*self.fleet.good} & {*self.fleet.refused}

    def join(self, place: int) -> None:
        self.num_named += 1
        name = self.names[place] = f"{place}.{self.num_named}"
        self.serving[name] = next(one for one in self.fleet.good if one not in self.fleet.refused)
        self.failed[name], self.controls[name] = {}, {}
        self.tell(Joined(names=(name,)))

    def champion(self) -> str:
        for draft in self.fleet.untold:
            self.tell(Told(draft=draft))
        return next(draft for draft in reversed(self.promoted) if draft not in self.fleet.refused)

    def look(self, place: int) -> None:
        name = self.names[place]
        if draft := self.control.pop(name, ""):
            self.failed[name][draft], self.controls[name][draft] = FAULT, place not in self.sick
        if (draft := self.loading.pop(name, "")) and (place in self.sick or draft in self.bad):
            self.control[name] = draft
        elif draft:
            self.serving[name] = draft
        failed, controls = self.failed[name], self.controls[name]
        self.tell(Seen(name=name, version=self.serving[name], proven=True, failed=failed, controls=controls))
        self.tell(Named(champion=(champion := self.champion())))
        wanted = next(
            (
                one
                for one in reversed(self.promoted[: self.promoted.index(champion) + 1])
                if self.fleet.may_load(name, one)
            ),
            "",
        )
        if not wanted or wanted == self.serving[name]:
            return
        if wanted == self.fleet.candidate:
            self.tell(Loading(name=name, draft=wanted))
            row = self.fleet.row(name)
            assert row is not None and row.state == "loading" and row.wave == self.fleet.wave
        assert wanted not in self.fleet.refused
        if wanted == self.control.get(name):
            return
        self.loading[name] = wanted
        self.loads.append((name, wanted, self.fleet.wave))

    def lose(self, place: int) -> None:
        self.loading.pop(self.names[place], None)
        self.control.pop(self.names[place], None)
        self.tell(Lost(names=(self.names[place],)))
        self.join(place)

    def go_away(self, place: int) -> None:
        name = self.names[place]
        self.loading.pop(name, None)
        if draft := self.control.pop(name, ""):
            self.failed[name][draft] = FAULT  # which is remembered, and not what followed
        self.tell(Away(name=name))

    def promote(self) -> None:
        self.promoted.append(f"{len(self.promoted) + 1}-x")

    def test(self) -> None:
        self.tell(Passed(draft=self.promoted[-1]))


PLACES = st.integers(0, 5)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("look"), PLACES),
        st.tuples(st.just("look"), PLACES),
        st.tuples(st.just("lose"), PLACES),
        st.tuples(st.just("go_away"), PLACES),
        st.tuples(st.just("promote"), st.none()),
        st.tuples(st.just("test"), st.none()),
        st.tuples(st.just("wait"), st.integers(1, 200)),
    ),
    max_size=50,
)


@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(1, 6),
    bad=st.sets(st.sampled_from(["2-x", "3-x"])),
    sick=st.sets(PLACES, max_size=2),
    told=OPERATIONS,
)
def test_whatever_happens_each_replica_ends_on_the_champion_or_the_last_good_draft(
    num: int, bad: set[str], sick: set[int], told: list[tuple[str, int | None]]
) -> None:
    world = Played(num, bad, sick)
    for name, argument in told:
        if argument is None:
            getattr(world, name)()
        elif name == "wait":
            world.now_s += argument
        else:
            getattr(world, name)(argument % num)
    for _ in range(4 * num + 20):  # from now on nothing more happens to them
        world.now_s += PARAMS.test_s
        for place in range(num):
            world.look(place)
    champion = world.champion()
    alone_and_sick = num == 1 and 0 in sick
    assert (world.fleet.candidate == "" or alone_and_sick) and world.loading == {}
    for place, name in world.names.items():
        well = champion not in world.failed[name]
        assert world.serving[name] == champion if well else world.serving[name] in world.fleet.good
        assert well or place in sick or champion in bad


@settings(max_examples=40, deadline=None)
@given(num=st.integers(2, 16), bad=st.booleans(), sick=st.sets(st.integers(0, 2), max_size=1), data=st.data())
def test_a_bad_draft_is_loaded_by_one_sound_canary_alone_and_a_good_one_reaches_all_that_are_sound(
    num: int, bad: bool, sick: set[int], data: st.DataObject
) -> None:
    world = Played(num, {"2-x"} if bad else set(), sick)
    world.promote()
    for place in data.draw(st.permutations([*range(num)] * 3)):
        world.now_s += 5
        world.look(place)
    for place in [*range(num)] * 10:
        world.now_s += PARAMS.test_s
        world.look(place)
    loaded = [name for name, draft, _ in world.loads if draft == "2-x"]
    assert len(loaded) == len({*loaded}) == (1 + (0 in sick) if bad else num)
    assert ("2-x" in world.fleet.refused) is bad
    has = {place for place, name in world.names.items() if world.serving[name] == "2-x"}
    assert has == (set() if bad else {*range(num)} - sick)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(num=st.integers(2, 40), data=st.data())
def test_a_good_draft_comes_in_waves_of_their_shares(num: int, data: st.DataObject) -> None:
    world = Played(num, set(), set())
    world.promote()
    for place in data.draw(st.permutations([*range(num)] * 40), label="looks"):
        world.now_s += 20
        world.look(place)
    in_order = [wave for _, draft, wave in world.loads if draft == "2-x"]
    assert len(in_order) == num and all(low <= high for low, high in pairwise(in_order))
    assert in_order.count(CANARY) == 1
    assert CANARY + 1 not in in_order or in_order.count(CANARY + 1) == math.ceil(num / 2) - 1
