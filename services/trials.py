"""What follows from how a trial of a draft ended: its probation, the canary prompts, its being put back.

Rules of the table in services/transitions.py: state and event in, next state and actions out.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from infra.events import PAIR_BROKE, TARGET_DIFFERS
from infra.status import Phase
from infra.versions import Version
from models.evaluation.canary import Finding
from services.events import (
    CalledOff,
    Checked,
    Count,
    Exhausted,
    Failed,
    Late,
    NoRoom,
    Passed,
    PutBack,
    Remember,
    Report,
    Restored,
    Say,
    SetSpeculation,
    Step,
    Tell,
    Undecided,
)  # fmt: skip
from services.states import DraftState, Loaded, Patience, Postponed, label, without

Rule = Callable[[DraftState, Any, Patience], Step]


def accept(state: DraftState, event: Passed, patience: Patience) -> Step:
    version = (draft := present(state.candidate or state.serving)).version
    state = replace(
        state,
        phase=Phase.SERVING,
        serving=draft,
        proof=event.proof,
        answers=event.answers,
        check_s=None,
        candidate=None,
        fallback=None,
        fault=None,
        memory=state.memory.with_good(version),
        postponed=without(state.postponed, version),
    )
    text = f"draft {version.number} serves, mean accepted length {event.proof.tau:.3f} on probation"
    return Step(state, (Remember(), Say(text)))


def refuse(state: DraftState, event: Failed, patience: Patience) -> Step:
    """Note that a version is bad; the registry is told now or at a later tick."""
    state = replace(
        state,
        memory=state.memory.with_refused(event.version, event.reason),
        postponed=without(state.postponed, event.version),
    )
    text = f"draft {event.version.number} is refused: {event.reason}"
    return Step(state, (Count("refused", text), Remember(), Report()))


def refuse_candidate(state: DraftState, event: Failed, patience: Patience) -> Step:
    if state.fault is not None:
        return postpone_candidate(state, Undecided(event.reason, event.now_s), patience)
    state, actions = refuse(state, event, patience)
    return Step(
        replace(state, phase=Phase.REVERTING, candidate=None), (Count("reverts"), PutBack(), *actions)
    )  # the engine comes before the books


def refuse_serving(state: DraftState, event: Failed, patience: Patience) -> Step:
    if state.fault is not None:
        return _pass_over_serving(state, Undecided(event.reason, event.now_s), patience)
    return refuse_candidate(replace(state, serving=None), event, patience)


def postpone(state: DraftState, event: NoRoom, patience: Patience) -> Step:
    """Note that a version could not be loaded; the engine was not touched."""
    return _postpone(state, event.version, event, patience)


def _postpone(state: DraftState, version: Version, event: NoRoom | Undecided, patience: Patience) -> Step:
    """Note that a version could not be judged."""
    before = state.postponed.get(label(version))
    num_attempts = 1 if before is None else before.num_attempts + 1
    postponed = Postponed.after(num_attempts, event.reason, patience, event.now_s)
    state = replace(state, postponed={**state.postponed, label(version): postponed})
    text = f"draft {version.number} is postponed: {postponed.describe(event.now_s)}"
    return Step(state, (Count("postponed", text),))


def postpone_serving(state: DraftState, event: Undecided, patience: Patience) -> Step:
    if state.fault is not None:
        return _pass_over_serving(state, event, patience)
    state, actions = _postpone(state, present(state.serving).version, event, patience)
    state = replace(state, phase=Phase.UNPROVEN)
    return Step(state, (SetSpeculation(state.speculates), *actions))  # the probation may have ended with it off


def postpone_candidate(state: DraftState, event: Undecided, patience: Patience) -> Step:
    version = present(state.candidate or state.serving).version
    state, actions = _postpone(state, version, event, patience)
    return Step(replace(state, phase=Phase.REVERTING, candidate=None), (*actions, Count("reverts"), PutBack()))


def _pass_over_serving(state: DraftState, event: Undecided, patience: Patience) -> Step:
    state, actions = postpone_candidate(state, event, patience)
    return Step(replace(state, serving=None, proof=None, answers=()), (SetSpeculation(False), *actions))


def give_back(state: DraftState, event: CalledOff, patience: Patience) -> Step:
    return Step(replace(state, phase=Phase.REVERTING, candidate=None), (Count("called_off"), PutBack()))


def resume_unproven(state: DraftState, event: CalledOff, patience: Patience) -> Step:
    return _resume(replace(state, phase=Phase.UNPROVEN))


def resume_serving(state: DraftState, event: CalledOff, patience: Patience) -> Step:
    return _resume(replace(state, phase=Phase.SERVING))


def _resume(state: DraftState) -> Step:
    return Step(state, (SetSpeculation(state.speculates), Count("called_off")))


def leave_unchecked(state: DraftState, event: Undecided, patience: Patience) -> Step:
    state = check_later(replace(state, phase=Phase.SERVING), event.now_s, patience)
    text = f"the canary prompts were not answered: {event.reason}"
    return Step(state, (SetSpeculation(state.speculates), Count("canaries_undecided", text)))


def conclude(state: DraftState, event: Checked, patience: Patience) -> Step:
    """Do what a look at the canary prompts asks for; it may have ended with speculation off."""
    if event.finding is Finding.PAIR:
        return _reload(state, event, patience)
    state = check_later(replace(state, phase=Phase.SERVING), event.now_s, patience)
    state = replace(state, fault=event.text if event.finding is Finding.TARGET else None)
    on, counted = SetSpeculation(state.speculates), Count("canaries")
    match event.finding:
        case Finding.FELL:
            return Step(state, (on, counted, Count("canaries_fell", event.text)))
        case Finding.TARGET:
            return Step(state, (on, counted, Count("target_differs", event.text), Tell(TARGET_DIFFERS, event.text)))
    return Step(state, (on, counted))


def _reload(state: DraftState, event: Checked, patience: Patience) -> Step:
    """Load the draft that broke again or, if it was, the last good one before it."""
    broken = present(state.serving).version
    again = state.reloaded == label(broken)
    state = replace(state, fault=event.text, reloaded=label(broken), proof=None, answers=())
    said = (Count("canaries"), Count("broken_pairs", event.text), Tell(PAIR_BROKE, event.text))
    if again:
        state, actions = _pass_over_serving(state, Undecided(event.text, event.now_s), patience)
        return Step(state, (*actions, *said))
    return Step(replace(state, phase=Phase.REVERTING), (SetSpeculation(False), PutBack(), *said))


def check_later(state: DraftState, now_s: float, patience: Patience) -> DraftState:
    return replace(state, check_s=now_s + patience.canary_period_s)


def restore(state: DraftState, event: Restored, patience: Patience) -> Step:
    same = state.serving is not None and label(state.serving.version) == label(event.draft.version)
    proof = state.proof if same else None
    phase = Phase.UNPROVEN if proof is None else Phase.SERVING
    answers = state.answers if same else ()
    return Step(replace(state, phase=phase, serving=event.draft, proof=proof, answers=answers, fallback=None))


def give_up(state: DraftState, event: Exhausted, patience: Patience) -> Step:
    return Step(off(state, "no good draft"), (SetSpeculation(False),))


def be_late(state: DraftState, event: Late, patience: Patience) -> Step:
    text = "the last good draft is not back in time; speculation is off until it is"
    state = replace(state, fallback="the last good draft is being put back")
    return Step(state, (SetSpeculation(False), Count("late", text)))


def off(state: DraftState, reason: str) -> DraftState:
    return replace(state, phase=Phase.OFF, serving=None, proof=None, answers=(), fallback=reason)


def present(draft: Loaded | None) -> Loaded:
    assert draft is not None, "this phase has a draft"
    return draft
