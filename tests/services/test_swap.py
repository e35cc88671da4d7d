"""The whole table: what every event does in every phase, and what holds after any run of events."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from infra.events import PAIR_BROKE, TARGET_DIFFERS
from infra.status import Phase, Proof
from infra.versions import Version, label
from models.core.evaluation.golden import Answer, CanaryParams, Finding
from models.serving import Probation, Serve
from services import swap
from services.drafts import KEPT_GOOD, MAX_FAILED_STARTS, MAX_WAIT_S, DraftHistory, DraftState, Loaded
from services.swap import (
    Action,
    Ask,
    CallOff,
    Check,
    Count,
    Event,
    Fetch,
    Prove,
    PutBack,
    Remember,
    Report,
    Say,
    SetSpeculation,
    Step,
    Tell,
    Try,
)  # fmt: skip

CANARY = CanaryParams(period_s=600.0, max_in_flight=4)
SERVE = Serve(probation=Probation(timeout_s=300.0), min_swap_interval_s=10.0, canary=CANARY)
EAGER = SERVE.model_copy(update={"canary": CanaryParams(period_s=20.0, max_in_flight=4)})


def step(state: DraftState, happened: Event, serve: Serve = SERVE) -> Step:
    return happened(state, serve)


def event(rule: Callable[..., Step], *about: Any, **more: Any) -> Event:
    """Return what happened, with what is known of it in the order of the rule's own arguments."""
    return partial(rule, **dict(zip([*signature(rule).parameters][2:], about, strict=False)), **more)


PROOF = Proof(weight_error=0.0, num_near_ties=0, tau=1.5, promised_tau=1.5)
PASSED = event(swap.passed, PROOF, (Answer((5, 6, 7), (3,), (1,)),))


def version(number: int) -> Version:
    return Version(kind="draft", number=number, sha256=f"{number:064x}", tags={}, created_ms=number)


def draft(number: int) -> Loaded:
    return Loaded(version(number), Path(f"/cache/{number}"))


def follow(state: DraftState, *events: Event) -> DraftState:
    for happened in events:
        state = step(state, happened).state
    return state


def kinds(actions: tuple[Action, ...]) -> list[object]:
    """Return the actions' classes; what is counted, by its name."""
    return [action.name if isinstance(action, Count) else type(action) for action in actions]


# Draft 1 is booted with, 2 is the champion that comes after it.
EMPTY = DraftState.started(None, DraftHistory())
UNPROVEN = DraftState.started(draft(1), DraftHistory())
PROVING = follow(UNPROVEN, event(swap.ticked, 0.0))
SERVING = follow(PROVING, PASSED)
CHECKING = follow(SERVING, event(swap.ticked, 0.0), event(swap.ticked, 600.0))
TRYING = follow(SERVING, event(swap.named, version(2), 20.0), event(swap.fetched, draft(2), 20.0))
REVERTING = follow(TRYING, event(swap.failed, version(2), "bad", 100.0))
OFF = follow(REVERTING, swap.exhausted)
STATES = {state.phase: state for state in (EMPTY, UNPROVEN, PROVING, SERVING, CHECKING, TRYING, REVERTING, OFF)}

EVENTS: dict[Callable[..., Step], Callable[[DraftState], Event]] = {
    swap.ticked: lambda _: event(swap.ticked, 100.0),
    swap.switched: lambda _: event(swap.switched, on=False),
    swap.named: lambda _: event(swap.named, version(3), 100.0),
    swap.fetched: lambda _: event(swap.fetched, draft(3), 100.0),
    swap.unfit: lambda _: event(swap.unfit, version(3), "another target"),
    swap.needs_replica: lambda _: event(swap.needs_replica, version(2), "another family"),
    swap.no_room: lambda _: event(swap.no_room, version(3), "little memory", 100.0),
    swap.out_of_reach: lambda _: event(swap.out_of_reach, version(3), "no answer", 100.0),
    swap.swapped: lambda _: event(swap.swapped, 30.0),
    swap.passed: lambda _: PASSED,
    swap.failed: lambda state: event(
        swap.failed, {Phase.PROVING: version(1), Phase.TRYING: version(2)}.get(state.phase, version(3)), "bad", 100.0
    ),
    swap.undecided: lambda _: event(swap.undecided, "RuntimeError", 100.0),
    swap.called_off: lambda _: swap.called_off,
    swap.checked: lambda _: event(swap.checked, Finding.SOUND, "", 100.0),
    swap.restored: lambda _: event(swap.restored, draft(1)),
    swap.exhausted: lambda _: swap.exhausted,
    swap.late: lambda _: swap.late,
    swap.quarantined: lambda _: event(swap.quarantined, version(1), "worse on live traffic"),
    swap.reported: lambda _: event(swap.reported, label(version(2))),
}

TRIALS = {Phase.PROVING, Phase.CHECKING, Phase.TRYING}
NEVER = None
LOOK, SWITCH, REFUSED = (Report, Ask), (SetSpeculation,), (Count, Remember, Report)
# In the order of Phase: EMPTY, UNPROVEN, PROVING, SERVING, CHECKING, TRYING, REVERTING, OFF. A cell is the next phase
# and the actions; a cell without a phase stays in its own.
EXPECTED: dict[Callable[..., Step], list[tuple[object, ...] | None]] = {
    swap.ticked: [LOOK, (Phase.PROVING, Prove, *LOOK), NEVER, LOOK, NEVER, NEVER, (PutBack, Report), LOOK],
    swap.switched: [
        SWITCH, SWITCH, (CallOff, *SWITCH), SWITCH, (CallOff, *SWITCH), (CallOff, *SWITCH), SWITCH, SWITCH,
    ],
    swap.named: [(Fetch,), (Fetch,), NEVER, (Fetch,), NEVER, NEVER, (), (Fetch,)],
    swap.fetched: [NEVER, (Phase.TRYING, Try), NEVER, (Phase.TRYING, Try), NEVER, NEVER, NEVER, (Phase.TRYING, Try)],
    swap.unfit: [(Count,), (Count,), NEVER, (Count,), NEVER, NEVER, NEVER, (Count,)],
    swap.needs_replica: [(Say,), (Say,), NEVER, (Say,), NEVER, NEVER, NEVER, (Say,)],
    swap.no_room: [NEVER, (Count,), NEVER, (Count,), NEVER, NEVER, NEVER, (Count,)],
    swap.out_of_reach: [(Count, Count), (Count, Count), NEVER, (Count, Count), NEVER, NEVER, NEVER, (Count, Count)],
    swap.swapped: [NEVER, NEVER, NEVER, NEVER, NEVER, (Count,), NEVER, NEVER],
    swap.passed: [
        NEVER, NEVER, (Phase.SERVING, Remember, Say), NEVER, NEVER, (Phase.SERVING, Remember, Say), NEVER, NEVER,
    ],
    swap.failed: [
        REFUSED, REFUSED, (Phase.REVERTING, Count, PutBack, *REFUSED), REFUSED, NEVER,
        (Phase.REVERTING, Count, PutBack, *REFUSED), NEVER, REFUSED,
    ],
    swap.undecided: [
        NEVER, NEVER, (Phase.UNPROVEN, SetSpeculation, Count), NEVER, (Phase.SERVING, SetSpeculation, Count),
        (Phase.REVERTING, Count, Count, PutBack), NEVER, NEVER,
    ],
    swap.called_off: [
        NEVER, NEVER, (Phase.UNPROVEN, SetSpeculation, Count), NEVER, (Phase.SERVING, SetSpeculation, Count),
        (Phase.REVERTING, Count, PutBack), NEVER, NEVER,
    ],
    swap.checked: [NEVER, NEVER, NEVER, NEVER, (Phase.SERVING, SetSpeculation, Count), NEVER, NEVER, NEVER],
    swap.restored: [NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, (Phase.SERVING,), NEVER],
    swap.exhausted: [NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, (Phase.OFF, SetSpeculation), NEVER],
    swap.late: [NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, (SetSpeculation, Count), NEVER],
    swap.quarantined: [
        NEVER, (Phase.OFF, SetSpeculation, Remember), NEVER, (Phase.OFF, SetSpeculation, Remember), NEVER, NEVER, NEVER,
        NEVER,
    ],
    swap.reported: [(Remember,), (Remember,), NEVER, (Remember,), NEVER, NEVER, (Remember,), (Remember,)],
}  # fmt: skip
CELLS = [(phase, kind, cell) for kind, row in EXPECTED.items() for phase, cell in zip(Phase, row, strict=True)]


def test_an_event_does_in_a_phase_what_the_table_says() -> None:
    for phase, kind, cell in CELLS:
        state = STATES[phase]
        happened = EVENTS[kind](state)
        if cell is None:
            with pytest.raises(RuntimeError, match=f"{kind.__name__} can't happen while a replica's draft is {phase}"):
                step(state, happened)
            continue
        after, actions = step(state, happened)
        moves = bool(cell) and isinstance(cell[0], Phase)
        assert (after.phase, *map(type, actions)) == (cell if moves else (phase, *cell)), (phase, kind.__name__)


def test_every_event_and_every_phase_is_in_the_table() -> None:
    events = {one for one in vars(swap).values() if hasattr(one, "__wrapped__")}
    assert events == EXPECTED.keys() == EVENTS.keys()
    assert STATES.keys() == set(Phase)


@pytest.mark.parametrize(
    ("state", "happened"),
    [
        (replace(UNPROVEN, wanted=False), event(swap.ticked, 0.0)),
        (follow(PROVING, event(swap.undecided, "slow", 100.0)), event(swap.ticked, 399.0)),
    ],
    ids=["speculation is off", "its wait is not over"],
)
def test_the_boot_draft_is_not_proven(state: DraftState, happened: Event) -> None:
    assert step(state, happened) == Step(state, (Report(), Ask()))


WAITING = follow(TRYING, event(swap.undecided, "slow", 30.0), event(swap.restored, draft(1)))


@pytest.mark.parametrize(
    ("state", "number", "now_s", "actions"),
    [
        (SERVING, 1, 100.0, ()),
        (replace(SERVING, wanted=False), 2, 100.0, ()),
        (replace(SERVING, replacement="another shape"), 2, 100.0, ()),
        (replace(SERVING, unfit={label(version(2)): "another target"}), 2, 100.0, ()),
        (follow(REVERTING, event(swap.restored, draft(1))), 2, 100.0, ()),
        (replace(SERVING, swapped_s=95.0), 2, 100.0, (Count("deferred"),)),
        (WAITING, 2, 329.0, ()),
        (WAITING, 2, 330.0, (Fetch(version(2)),)),
        (WAITING, 3, 40.0, (Fetch(version(3)),)),
    ],
    ids=["served", "off", "replacement", "unfit", "refused", "too soon", "waits", "due", "another one"],
)
def test_a_champion_is_fetched_if_it_is_new_and_may_be_tried(
    state: DraftState, number: int, now_s: float, actions: tuple[Action, ...]
) -> None:
    after = step(state, event(swap.named, version(number), now_s))
    assert (after.state.champion, after.state.phase, after.actions) == (number, state.phase, actions)


def test_a_refusal_is_remembered_and_reported_and_ends_the_wait() -> None:
    failed = event(swap.failed, version(2), "fc.weight is missing", 100.0)
    after, name = follow(WAITING, event(swap.named, version(2), 400.0), failed), label(version(2))
    assert after.refused == after.memory.refused == after.unreported == {name: "fc.weight is missing"}
    assert (after.postponed, follow(after, event(swap.reported, name)).unreported) == ({}, {})


def test_a_refusal_is_forgotten_when_its_quarantine_was_cleared_after_the_report() -> None:
    unreported = follow(REVERTING, event(swap.restored, draft(1)))
    reported = follow(unreported, event(swap.reported, label(version(2))))
    quarantined = version(2).model_copy(update={"tags": {"quarantined": "bad"}})
    assert step(unreported, event(swap.named, version(2), 100.0)).actions == ()
    assert step(reported, event(swap.named, quarantined, 100.0)).actions == ()
    after = step(reported, event(swap.named, version(2), 100.0))
    assert after.state.refused == after.state.memory.refused == {}
    assert [type(action) for action in after.actions] == [Remember, Say, Fetch]


@pytest.mark.parametrize("wanted", [True, False])
def test_after_a_probation_that_could_not_judge_the_engine_speculates_if_it_is_wanted_to(wanted: bool) -> None:
    after = step(replace(PROVING, wanted=wanted), event(swap.undecided, "the target alone parts", 0.0))
    assert after.actions[0] == SetSpeculation(on=wanted)


def test_a_draft_is_refused_when_it_alone_fails_at_start_after_start() -> None:
    memory = DraftHistory(good=(version(2),))
    for num_starts in range(1, MAX_FAILED_STARTS):
        memory = memory.after_start([version(2)])
        assert (memory.refused, memory.failed_starts) == ({}, {label(version(2)): num_starts})
    both = memory.after_start([version(2), version(3)])
    assert (both.refused, both.failed_starts) == ({}, {label(version(2)): MAX_FAILED_STARTS, label(version(3)): 1})
    refused = memory.after_start([version(2)])
    assert (refused.good, refused.failed_starts) == ((), {})
    assert refused.refused == {label(version(2)): "the engine started without it, and not with it, 3 times"}
    assert refused.unreported == (label(version(2)),)


def test_a_start_that_a_draft_did_not_fail_or_a_probation_that_it_passed_ends_the_row() -> None:
    memory = DraftHistory().after_start([version(2)]).after_start([version(2)])
    assert memory.after_start([]).failed_starts == memory.with_good(version(2)).failed_starts == {}


def test_the_wait_of_a_draft_that_the_engine_did_not_start_with_grows_with_each_start() -> None:
    memory = DraftHistory().after_start([version(2), version(3)]).after_start([version(2)])
    waits = memory.postponed(SERVE, 50.0)[label(version(2))]
    assert (waits.num_attempts, waits.wait_s, waits.due_s) == (2, 600.0, 650.0)


def test_waits_double_up_to_the_longest() -> None:
    state, waits = PROVING, []
    for _ in range(6):
        state = follow(state, event(swap.undecided, "slow", 0.0))
        waits.append(state.postponed[label(version(1))].wait_s)
        state = follow(state, event(swap.ticked, MAX_WAIT_S))
    assert waits == [300.0, 600.0, 1200.0, 2400.0, MAX_WAIT_S, MAX_WAIT_S]


def test_the_wait_of_what_is_neither_served_nor_champion_is_forgotten() -> None:
    assert set(follow(WAITING, event(swap.named, version(2), 31.0)).postponed) == {label(version(2))}
    assert follow(WAITING, event(swap.named, version(1), 31.0)).postponed == {}


def test_what_was_served_is_put_back_first_and_what_failed_never() -> None:
    memory = DraftHistory(good=(version(1), version(2), version(4)))
    state = follow(replace(TRYING, memory=memory), event(swap.failed, version(2), "bad", 100.0))
    assert state.fallbacks() == (draft(1), version(4))
    state = follow(replace(PROVING, memory=memory), event(swap.failed, version(1), "bad", 100.0))
    assert state.fallbacks() == (version(2), version(4))


def test_a_draft_that_is_put_back_is_proven_unless_it_was_before() -> None:
    again = follow(REVERTING, event(swap.restored, draft(1)))
    assert (again.phase, again.proof, again.fallback) == (Phase.SERVING, PROOF, None)
    other = follow(REVERTING, event(swap.restored, draft(4)))
    assert (other.phase, other.proof, other.serving) == (Phase.UNPROVEN, None, draft(4))


def test_an_operator_gets_no_speculation_without_a_good_draft() -> None:
    asked = {phase: step(state, event(swap.switched, on=True)).actions for phase, state in STATES.items()}
    assert {phase for phase, told in asked.items() if told == (SetSpeculation(on=True),)} == {
        Phase.UNPROVEN,
        Phase.SERVING,
    }
    assert step(SERVING, event(swap.switched, on=False)).actions == (SetSpeculation(on=False),)


@pytest.mark.parametrize("phase", sorted(TRIALS))
def test_a_trial_is_called_off_at_once_and_switched_on_again_it_is_not_disturbed(phase: Phase) -> None:
    off, actions = step(STATES[phase], event(swap.switched, on=False))
    assert (off.wanted, actions) == (False, (CallOff(), SetSpeculation(on=False)))
    assert step(STATES[phase], event(swap.switched, on=True)).actions == ()
    after, actions = step(off, swap.called_off)
    assert (after.postponed, after.refused) == ({}, {})
    again, actions = step(follow(off, event(swap.switched, on=True)), swap.called_off)
    assert again.wanted
    assert actions[0] == (Count("called_off") if phase is Phase.TRYING else SetSpeculation(on=True))


@pytest.mark.parametrize(
    ("state", "now_s", "in_flight", "asked"),
    [
        (SERVING, 599.0, 0, False),
        (SERVING, 600.0, 4, True),
        (SERVING, 600.0, 5, False),
        (SERVING, 1200.0, 5, True),
        (replace(SERVING, wanted=False), 600.0, 0, False),
        (replace(SERVING, answers=()), 600.0, 0, False),
    ],
    ids=["too early", "quiet", "busy", "busy for too long", "off", "nothing to compare with"],
)
def test_the_canary_prompts_are_asked_now_and_then(
    state: DraftState, now_s: float, in_flight: int, asked: bool
) -> None:
    after = step(follow(state, event(swap.ticked, 0.0)), event(swap.ticked, now_s, in_flight))
    assert (after.state.phase is Phase.CHECKING, Check(draft(1)) in after.actions) == (asked, asked)


def test_canary_prompts_that_fell_alone_are_counted_and_asked_again() -> None:
    after, actions = step(CHECKING, event(swap.checked, Finding.FELL, "lost 50%", 610.0))
    assert (after.phase, after.fault, after.check_s) == (Phase.SERVING, None, 1210.0)
    assert kinds(actions) == [SetSpeculation, "canaries", "canaries_fell"]


def test_a_target_that_parts_from_its_reference_is_told_of_until_it_no_longer_does() -> None:
    after, actions = step(CHECKING, event(swap.checked, Finding.TARGET, "the target parts", 610.0))
    assert (after.phase, after.fault, after.refused) == (Phase.SERVING, "the target parts", {})
    assert actions[-1] == Tell(TARGET_DIFFERS, "the target parts")
    assert actions[0] == SetSpeculation(on=True)
    assert follow(after, event(swap.ticked, 1210.0), event(swap.checked, Finding.SOUND, "", 1220.0)).fault is None


BROKEN = event(swap.checked, Finding.PAIR, "lost 50%", 610.0)


def test_a_pair_that_broke_is_switched_off_loaded_again_and_proven() -> None:
    broken, actions = step(CHECKING, BROKEN)
    assert kinds(actions) == [SetSpeculation, PutBack, "canaries", "broken_pairs", Tell]
    assert (actions[0], actions[-1]) == (SetSpeculation(on=False), Tell(PAIR_BROKE, "lost 50%"))
    loaded = follow(broken, event(swap.restored, draft(1)))
    assert (loaded.phase, loaded.proof, loaded.fault) == (Phase.UNPROVEN, None, "lost 50%")
    assert follow(loaded, event(swap.ticked, 620.0), PASSED).fault is None


def test_a_pair_that_broke_twice_gives_way_to_the_draft_before() -> None:
    broken = follow(replace(CHECKING, memory=DraftHistory(good=(version(1), version(4)))), BROKEN)
    ticks = [event(swap.ticked, now_s) for now_s in (620.0, 620.0, 1220.0)]
    again = follow(broken, event(swap.restored, draft(1)), ticks[0], PASSED, *ticks[1:], BROKEN)
    assert (again.phase, again.serving, again.fallbacks()) == (Phase.REVERTING, None, (version(4),))
    assert (again.refused, set(again.postponed)) == ({}, {label(version(1))})


@pytest.mark.parametrize(
    "ended", [event(swap.failed, version(1), "promised 1.5", 630.0), event(swap.undecided, "slow", 630.0)]
)
def test_after_a_pair_broke_no_draft_is_blamed_until_one_passes(ended: Event) -> None:
    memory = DraftHistory(good=(version(1), version(4)))
    proving = follow(
        replace(CHECKING, memory=memory), BROKEN, event(swap.restored, draft(1)), event(swap.ticked, 620.0)
    )
    failed, actions = step(proving, ended)
    assert (failed.refused, set(failed.postponed), failed.fallbacks()) == ({}, {label(version(1))}, (version(4),))
    assert kinds(actions) == [SetSpeculation, "postponed", "reverts", PutBack]
    other = follow(failed, event(swap.restored, draft(4)), event(swap.ticked, 640.0))
    passed = follow(other, PASSED)
    assert (passed.phase, passed.serving, passed.fault) == (Phase.SERVING, draft(4), None)
    none = follow(other, event(swap.failed, version(4), "promised 1.5", 650.0))
    assert (none.refused, none.fallbacks(), follow(none, swap.exhausted).speculates) == ({}, (), False)


FAILED = replace(TRYING, in_fleet=True, memory=DraftHistory(good=(version(1), version(4))))
FAILED = follow(FAILED, event(swap.failed, version(2), "bad", 100.0))
CONTROL = follow(FAILED, event(swap.restored, draft(1)), event(swap.ticked, 110.0))
BAD = label(version(2))


def test_in_a_fleet_the_last_good_draft_is_proven_again_before_a_refusal_is_told() -> None:
    assert (FAILED.refused, FAILED.unreported, FAILED.serving) == ({BAD: "bad"}, {}, draft(1))
    assert (CONTROL.phase, CONTROL.control, CONTROL.proof) == (Phase.PROVING, BAD, PROOF)
    passed = follow(CONTROL, PASSED)
    assert (passed.phase, passed.controls, passed.unreported) == (Phase.SERVING, {BAD: True}, {BAD: "bad"})
    assert passed.fault is None
    anew = follow(replace(passed, phase=Phase.TRYING, candidate=draft(2)), event(swap.failed, version(2), "bad", 130.0))
    assert (anew.control, anew.controls) == (BAD, {})


def test_a_last_good_draft_that_fails_as_a_control_is_not_refused_and_the_replica_says_so() -> None:
    failed, actions = step(CONTROL, event(swap.failed, version(1), "promised 1.5", 120.0))
    assert (failed.refused, failed.controls, failed.unreported) == ({BAD: "bad"}, {BAD: False}, {BAD: "bad"})
    assert (set(failed.postponed), failed.fallbacks()) == ({label(version(1))}, (version(4),))
    assert kinds(actions) == [SetSpeculation, "postponed", "reverts", PutBack, "broken_pairs", Tell]
    assert failed.fault is not None and actions[-1] == Tell(PAIR_BROKE, failed.fault)


@pytest.mark.parametrize(
    ("state", "happened", "serving"),
    [
        (CONTROL, (event(swap.undecided, "took more than 300 s", 120.0),), draft(1)),
        (FAILED, (swap.late, event(swap.restored, draft(1))), draft(1)),
        (CONTROL, (event(swap.switched, on=False), swap.called_off, event(swap.switched, on=True)), draft(1)),
        (FAILED, (event(swap.restored, draft(4)), event(swap.ticked, 110.0), PASSED), draft(4)),
    ],
    ids=["not proven in time", "not back in time", "switched off and on", "another draft"],
)
def test_a_last_good_draft_that_is_not_tested_again_serves_on_and_tells_of_no_fault(
    state: DraftState, happened: tuple[Event, ...], serving: Loaded
) -> None:
    after = follow(state, *happened)
    assert (after.phase, after.serving, after.proof) == (Phase.SERVING, serving, PROOF)
    assert (after.control, after.controls, after.unreported, after.fault) == ("", {}, {BAD: "bad"}, None)


def test_a_proven_draft_that_fails_once_its_control_was_called_off_is_not_refused_either() -> None:
    off = follow(CONTROL, event(swap.switched, on=False), event(swap.failed, version(1), "promised 1.5", 120.0))
    assert (off.refused, off.controls, off.fallbacks()) == ({BAD: "bad"}, {}, (version(4),))
    assert off.fault is not None


def test_without_a_last_good_draft_or_speculation_there_is_no_control() -> None:
    off = follow(CONTROL, event(swap.switched, on=False))
    first = follow(replace(PROVING, in_fleet=True), event(swap.failed, version(1), "bad", 100.0))
    unproven = follow(replace(TRYING, in_fleet=True, proof=None), event(swap.failed, version(2), "bad", 100.0))
    for state in (off, follow(off, swap.called_off), first, unproven):
        assert (state.control, state.controls, len(state.unreported)) == ("", {}, 1)


def test_only_the_last_good_versions_are_remembered() -> None:
    memory = DraftHistory()
    for number in (1, 2, 3, 2, 4):
        memory = memory.with_good(version(number))
    assert [good.number for good in memory.good] == [4, 2, 3]
    assert len(memory.good) == KEPT_GOOD


def something(rng: random.Random, state: DraftState, now_s: float) -> Event:
    """Return an event that the world may bring: what comes out of an action is about that action's draft."""
    fresh = version(rng.randrange(5, 9))
    on_trial = (state.candidate or state.serving or draft(9)).version
    failed = on_trial if state.phase in (Phase.PROVING, Phase.TRYING) else fresh
    known = {label(good) for good in state.memory.good} | state.refused.keys()
    fallbacks = [one if isinstance(one, Loaded) else Loaded(one, Path("/cache")) for one in state.fallbacks()]
    events: list[Event] = [
        event(swap.ticked, now_s),
        event(swap.switched, rng.random() < 0.7),
        event(swap.named, rng.choice([None, fresh]), now_s),
        event(swap.swapped, 1.0),
        PASSED,
        event(swap.undecided, "slow", now_s),
        swap.exhausted,
        event(swap.failed, failed, "bad", now_s),
        event(swap.unfit, fresh, "other"),
        swap.called_off,
        event(swap.checked, rng.choice(list(Finding)), "found", now_s),
        swap.late,
        *[event(swap.restored, one) for one in fallbacks],
        *([event(swap.quarantined, state.serving.version, "worse")] if state.serving else []),
        *([event(swap.fetched, Loaded(fresh, Path("/cache")), now_s)] if label(fresh) not in known else []),
    ]
    if state.phase not in (Phase.PROVING, Phase.TRYING) and label(fresh) in known:
        events = [one for one in events if rule_of(one) is not swap.failed]
    return rng.choice([one for one in events if EXPECTED[rule_of(one)][list(Phase).index(state.phase)] is not None])


def rule_of(happened: Event) -> Callable[..., Step]:
    return happened.func if isinstance(happened, partial) else happened


def engine_speculates(before: bool, happened: Event, state: DraftState, actions: tuple[Action, ...]) -> bool:
    """Return whether the engine drafts after the actions of an event."""
    on = state.wanted if rule_of(happened) is swap.restored else before
    for action in actions:
        on = action.on if isinstance(action, SetSpeculation) else on or isinstance(action, Prove | Try)
    return on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("boot", "in_fleet"),
    [(None, False), (draft(1), False), (draft(1), True)],
    ids=["without a draft", "with one", "in a fleet"],
)
def test_after_any_run_of_events_the_state_is_consistent(boot: Loaded | None, in_fleet: bool) -> None:
    seen = set()
    for seed in range(100):
        rng, state = random.Random(seed), replace(DraftState.started(boot, DraftHistory()), in_fleet=in_fleet)
        speculating = state.speculates
        for now_s in range(60):
            happened = something(rng, state, float(now_s * 20))
            state, actions = step(state, happened, EAGER)
            speculating = engine_speculates(speculating, happened, state, actions)
            assert state.wanted or not speculating
            seen.add(state.phase)
            proven, unproven = state.phase is Phase.SERVING, state.phase in (Phase.UNPROVEN, Phase.PROVING)
            silent = state.phase in (Phase.EMPTY, Phase.OFF)
            assert (state.candidate is not None) is (state.phase is Phase.TRYING)
            controlled = state.phase in (Phase.REVERTING, Phase.UNPROVEN, Phase.PROVING) and in_fleet and state.wanted
            assert not state.control or (controlled and state.serving is not None and state.proof is not None)
            assert not proven or (state.serving and state.proof and state.fallback is None)
            assert not unproven or (state.serving and state.fallback is None)
            assert not unproven or state.proof is None or in_fleet  # a control
            assert not silent or (state.serving is None and state.proof is None and state.fallback)
            assert state.serving is None or label(state.serving.version) not in state.memory.refused
            assert not {label(good) for good in state.memory.good} & state.memory.refused.keys()
            assert not (silent or state.phase is Phase.REVERTING) or not state.speculates
    assert seen == ({Phase.EMPTY} if boot is None else set(Phase) - {Phase.EMPTY})
