"""What a replica does about what happens to its drafts: one table.

`step` takes the state and an event and returns the next state and the actions that follow; it touches nothing.
services/reconciler.py executes the actions, each of which may bring the next event:

    started with a draft ──► UNPROVEN ──its probation is due──► PROVING ──passed──► SERVING
                                ▲  ▲                               │ │
                                │  └──────────undecided────────────┘ └──failed──► REVERTING
                                │
                                └──another draft restored──┐
    UNPROVEN, SERVING, OFF ──a champion was fetched──► TRYING ──passed──► SERVING
                                                           └──failed, undecided──► REVERTING
    REVERTING ──the last good draft restored──► SERVING, or UNPROVEN if it was not proven here
    REVERTING ──none can be──► OFF
    UNPROVEN, SERVING ──the draft was quarantined elsewhere, and there is no champion──► OFF
    started without a draft ──► EMPTY: a champion that comes needs another replica

A draft that *failed* showed a fault of its own and is refused for good. One that is *undecided* could not be judged,
because the engine failed, was too busy to answer the golden prompts in time, or answers them otherwise without a draft
too: it is postponed, and tried again after a wait that doubles each time. The draft that a replica booted with goes on
serving meanwhile, and another champion is followed at once. A draft that the engine did not start with waits in the
same way (see `services.states.Memory.after_start`).

A refusal is reported once. A version whose quarantine somebody cleared after that is tried like any other when it is
promoted again.

Two things are no phases, since they hold in several of them. While an operator has speculation switched off (`wanted`)
nothing is proven or swapped: a probation would have nothing to measure. A champion that can't be swapped in, of another
family, shape or K, makes the replica ask for its own `replacement`; it goes on with what it has, and follows nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from infra.status import Phase
from services.events import (
    Action,
    Ask,
    Count,
    Event,
    Exhausted,
    Failed,
    Fetch,
    Fetched,
    Inspect,
    MadeForAnother,
    Named,
    NeedsReplica,
    Passed,
    Prove,
    PutBack,
    Quarantined,
    Remember,
    Report,
    Reported,
    Restored,
    Say,
    SetSpeculation,
    Swapped,
    Switched,
    Ticked,
    Try,
    Undecided,
)  # fmt: skip
from services.states import DraftState, Loaded, Patience, Postponed, label, without


class Step(NamedTuple):
    """The next state, and what is to be done."""

    state: DraftState
    actions: tuple[Action, ...] = ()


def step(state: DraftState, event: Event, patience: Patience) -> Step:
    """Return what follows from an event.

    Raises:
        RuntimeError: the event can't happen in this phase.
    """
    rule = TABLE[type(event)][PHASES.index(state.phase)]
    if rule is None:
        raise RuntimeError(f"{type(event).__name__} can't happen while a replica's draft is {state.phase}")
    return rule(state, event, patience)


def _look(state: DraftState, event: Ticked, patience: Patience) -> Step:
    return Step(state, (Report(), Ask()))


def _judge(state: DraftState, event: Ticked, patience: Patience) -> Step:
    serving = _present(state.serving)
    if not state.wanted or not state.is_due(serving.version, event.now_s):
        return Step(state, (Report(), Ask()))
    return Step(replace(state, phase=Phase.PROVING), (Prove(serving), Report(), Ask()))


def _put_back_again(state: DraftState, event: Ticked, patience: Patience) -> Step:
    return Step(state, (PutBack(), Report(), Ask()))


def _switch(state: DraftState, event: Switched, patience: Patience) -> Step:
    state = replace(state, wanted=event.on)
    return Step(state, (SetSpeculation(state.speculates),))


def _consider(state: DraftState, event: Named, patience: Patience) -> Step:
    champion, serving = event.champion, None if state.serving is None else state.serving.version
    current = {label(version) for version in (champion, serving) if version is not None}
    state = replace(
        state,
        champion=None if champion is None else champion.number,
        postponed={name: one for name, one in state.postponed.items() if name in current},
    )
    if champion is None:  # the last good draft stays, unless somebody found it bad
        return Step(state, () if serving is None else (Inspect(serving),))
    memory = state.memory.without_cleared(champion)
    cleared: tuple[Action, ...] = ()
    if memory != state.memory:
        text = f"the quarantine of draft {champion.number} was cleared"
        state, cleared = replace(state, memory=memory), (Remember(), Say(text))
    known = label(champion) in state.refused or (serving is not None and label(champion) == label(serving))
    if known or not state.wanted or state.replacement is not None:
        return Step(state, cleared)
    if state.swapped_s is not None and event.now_s - state.swapped_s < patience.min_swap_interval_s:
        return Step(state, (*cleared, Count("deferred")))
    return Step(state, (*cleared, Fetch(champion)) if state.is_due(champion, event.now_s) else cleared)


def _try(state: DraftState, event: Fetched, patience: Patience) -> Step:
    return Step(replace(state, phase=Phase.TRYING, candidate=event.draft, swapped_s=event.now_s), (Try(event.draft),))


def _leave_alone(state: DraftState, event: MadeForAnother, patience: Patience) -> Step:
    unfit = {**state.unfit, label(event.version): event.reason}
    text = f"draft {event.version.number} does not fit: {event.reason}"
    return Step(replace(state, unfit=unfit), (Count("unfit", text),))


def _hand_over(state: DraftState, event: NeedsReplica, patience: Patience) -> Step:
    return Step(replace(state, replacement=event.reason), (Say(event.reason),))


def _note_swap(state: DraftState, event: Swapped, patience: Patience) -> Step:
    return Step(replace(state, swap_ms=event.swap_ms), (Count("swaps"),))


def _accept(state: DraftState, event: Passed, patience: Patience) -> Step:
    version = (draft := _present(state.candidate or state.serving)).version
    state = replace(
        state,
        phase=Phase.SERVING,
        serving=draft,
        proof=event.proof,
        candidate=None,
        fallback=None,
        memory=state.memory.with_good(version),
        postponed=without(state.postponed, version),
    )
    text = f"draft {version.number} serves, mean accepted length {event.proof.tau:.3f} on probation"
    return Step(state, (Remember(), Say(text)))


def _refuse(state: DraftState, event: Failed, patience: Patience) -> Step:
    """Note that a version is bad; the registry is told now or at a later tick."""
    state = replace(
        state,
        memory=state.memory.with_refused(event.version, event.reason),
        postponed=without(state.postponed, event.version),
    )
    text = f"draft {event.version.number} is refused: {event.reason}"
    return Step(state, (Count("refused", text), Remember(), Report()))


def _refuse_candidate(state: DraftState, event: Failed, patience: Patience) -> Step:
    state, actions = _refuse(state, event, patience)
    return Step(
        replace(state, phase=Phase.REVERTING, candidate=None), (Count("reverts"), PutBack(), *actions)
    )  # the engine comes before the books


def _refuse_serving(state: DraftState, event: Failed, patience: Patience) -> Step:
    return _refuse_candidate(replace(state, serving=None), event, patience)


def _postpone(state: DraftState, event: Undecided, patience: Patience) -> Step:
    """Note that a version could not be judged."""
    version = _present(state.candidate or state.serving).version
    before = state.postponed.get(label(version))
    num_attempts = 1 if before is None else before.num_attempts + 1
    postponed = Postponed.after(num_attempts, event.reason, patience, event.now_s)
    state = replace(state, postponed={**state.postponed, label(version): postponed})
    text = f"draft {version.number} is postponed: {postponed.describe(event.now_s)}"
    return Step(state, (Count("postponed", text),))


def _postpone_serving(state: DraftState, event: Undecided, patience: Patience) -> Step:
    state, actions = _postpone(state, event, patience)
    state = replace(state, phase=Phase.UNPROVEN)
    return Step(state, (SetSpeculation(state.speculates), *actions))  # the probation may have ended with it off


def _postpone_candidate(state: DraftState, event: Undecided, patience: Patience) -> Step:
    state, actions = _postpone(state, event, patience)
    return Step(replace(state, phase=Phase.REVERTING, candidate=None), (*actions, Count("reverts"), PutBack()))


def _restore(state: DraftState, event: Restored, patience: Patience) -> Step:
    same = state.serving is not None and label(state.serving.version) == label(event.draft.version)
    proof = state.proof if same else None
    phase = Phase.UNPROVEN if proof is None else Phase.SERVING
    return Step(replace(state, phase=phase, serving=event.draft, proof=proof, fallback=None))


def _give_up(state: DraftState, event: Exhausted, patience: Patience) -> Step:
    return Step(_off(state, "no good draft"), (SetSpeculation(False),))


def _retire(state: DraftState, event: Quarantined, patience: Patience) -> Step:
    memory = state.memory.with_refused(event.version, event.reason).with_reported(label(event.version))
    state = replace(_off(state, f"draft {event.version.number} was quarantined"), memory=memory)
    return Step(state, (SetSpeculation(False), Remember()))


def _note_report(state: DraftState, event: Reported, patience: Patience) -> Step:
    return Step(replace(state, memory=state.memory.with_reported(event.name)), (Remember(),))


def _off(state: DraftState, reason: str) -> DraftState:
    return replace(state, phase=Phase.OFF, serving=None, proof=None, fallback=reason)


def _present(draft: Loaded | None) -> Loaded:
    assert draft is not None, "this phase has a draft"
    return draft


Rule = Callable[[DraftState, Any, Patience], Step]
PHASES = tuple(Phase)
# A row for each event, a column for each phase; None is what can't happen.
TABLE: Mapping[type[Event], tuple[Rule | None, ...]] = {
    # in:            EMPTY, UNPROVEN, PROVING, SERVING, TRYING, REVERTING, OFF
    Ticked: (_look, _judge, None, _look, None, _put_back_again, _look),
    Switched: (_switch, _switch, None, _switch, None, _switch, _switch),
    Named: (_consider, _consider, None, _consider, None, None, _consider),
    Fetched: (None, _try, None, _try, None, None, _try),
    MadeForAnother: (_leave_alone, _leave_alone, None, _leave_alone, None, None, _leave_alone),
    NeedsReplica: (_hand_over, _hand_over, None, _hand_over, None, None, _hand_over),
    Swapped: (None, None, None, None, _note_swap, None, None),
    Passed: (None, None, _accept, None, _accept, None, None),
    Failed: (_refuse, _refuse, _refuse_serving, _refuse, _refuse_candidate, None, _refuse),
    Undecided: (None, None, _postpone_serving, None, _postpone_candidate, None, None),
    Restored: (None, None, None, None, None, _restore, None),
    Exhausted: (None, None, None, None, None, _give_up, None),
    Quarantined: (None, _retire, None, _retire, None, None, None),
    Reported: (_note_report, _note_report, None, _note_report, None, None, _note_report),
}
