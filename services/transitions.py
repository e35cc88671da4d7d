"""What a replica does about what happens to its drafts: one table.

`step` takes the state and an event and returns the next state and the actions that follow; it touches nothing.
services/reconciler.py executes the actions, each of which may bring the next event. What follows from how a trial ended
is in services/trials.py.


    started with a draft ──► UNPROVEN ──its probation is due──► PROVING ──passed──► SERVING
                                ▲  ▲                               │ │
                                │  └──────────undecided────────────┘ └──failed──► REVERTING
                                │
                                └──another draft restored──┐
    UNPROVEN, SERVING, OFF ──a champion was fetched──► TRYING ──passed──► SERVING
                                                           └──failed, undecided, called off──► REVERTING
    SERVING ──the canary prompts are due──► CHECKING ──the pair is broken──► REVERTING
                                                └──anything else──► SERVING
    REVERTING ──the last good draft restored──► SERVING, or UNPROVEN if it was not proven here
    REVERTING ──none can be──► OFF; not in time ──► REVERTING, with speculation off
    UNPROVEN, SERVING ──the draft was quarantined elsewhere, and there is no champion──► OFF
    started without a draft ──► EMPTY: a champion that comes needs another replica

A champion that there is no memory to load beside the served draft is postponed before the engine is touched.

A draft that *failed* showed a fault of its own and is refused for good. One that is *undecided* could not be judged,
because the engine failed, was too busy to answer the golden prompts in time, or answers them otherwise without a draft
too: it is postponed, and tried again after a wait that doubles each time. The draft that a replica booted with goes on
serving meanwhile, and another champion is followed at once. A draft that the engine did not start with waits in the
same way (see `services.states.Memory.after_start`).

A draft that broke while it served is loaded again and put on probation. If it breaks once more, or fails, it waits like
one that is undecided and the last good one before it is put back: what broke may be the engine. So until a draft passes
again (`fault`) none is refused for what it shows on probation.

A refusal is reported once. A version whose quarantine somebody cleared after that is tried like any other when it is
promoted again.

Two things are no phases, since they hold in several of them. While an operator has speculation switched off (`wanted`)
nothing is proven or swapped: a probation would have nothing to measure, and one that is on its way is called off. It is
the one event that comes at any time, also between the actions of another. A champion that can't be swapped in, of
another family, shape or K, makes the replica ask for its own `replacement`; it goes on with what it has, and follows
nothing. Not so one that is champion again because a newer one was quarantined: nobody asked for it, and while a replica
is replaced nothing is served. It waits for the next start, and is told of among those that are left alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from infra.status import Phase
from services import trials
from services.events import (
    Action,
    Ask,
    CalledOff,
    CallOff,
    Check,
    Checked,
    Count,
    Event,
    Exhausted,
    Failed,
    Fetch,
    Fetched,
    Inspect,
    Late,
    MadeForAnother,
    Named,
    NeedsReplica,
    NoRoom,
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
    Step,
    Swapped,
    Switched,
    Ticked,
    Try,
    Undecided,
)  # fmt: skip
from services.states import DraftState, Patience, label
from services.trials import Rule, check_later, off, present


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
    serving = present(state.serving)
    if not state.wanted or not state.is_due(serving.version, event.now_s):
        return Step(state, (Report(), Ask()))
    return Step(replace(state, phase=Phase.PROVING), (Prove(serving), Report(), Ask()))


def _watch(state: DraftState, event: Ticked, patience: Patience) -> Step:
    if state.check_s is None:
        return Step(check_later(state, event.now_s, patience), (Report(), Ask()))
    busy = event.in_flight > patience.canary_max_in_flight and event.now_s < state.check_s + patience.canary_period_s
    if not state.wanted or not state.answers or event.now_s < state.check_s or busy:
        return Step(state, (Report(), Ask()))
    return Step(replace(state, phase=Phase.CHECKING), (Check(present(state.serving)), Report(), Ask()))


def _put_back_again(state: DraftState, event: Ticked, patience: Patience) -> Step:
    return Step(state, (PutBack(), Report()))


def _switch(state: DraftState, event: Switched, patience: Patience) -> Step:
    state = replace(state, wanted=event.on)
    return Step(state, (SetSpeculation(state.speculates),))


def _switch_on_trial(state: DraftState, event: Switched, patience: Patience) -> Step:
    """Call a trial off; switched on again, it decides itself when is drafted, and `CalledOff` does once it ended."""
    state = replace(state, wanted=event.on)
    return Step(state, () if event.on else (CallOff(), SetSpeculation(False)))


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


def _wait(state: DraftState, event: Named, patience: Patience) -> Step:
    return Step(state)  # first the last good draft


def _try(state: DraftState, event: Fetched, patience: Patience) -> Step:
    if not state.wanted:  # it was switched off meanwhile
        return Step(state)
    return Step(replace(state, phase=Phase.TRYING, candidate=event.draft, swapped_s=event.now_s), (Try(event.draft),))


def _leave_alone(state: DraftState, event: MadeForAnother, patience: Patience) -> Step:
    unfit = {**state.unfit, label(event.version): event.reason}
    text = f"draft {event.version.number} does not fit: {event.reason}"
    return Step(replace(state, unfit=unfit), (Count("unfit", text),))


def _hand_over(state: DraftState, event: NeedsReplica, patience: Patience) -> Step:
    if event.goes_back:  # this replica answers on, without a draft if its own is the one that was quarantined
        text = f"{event.reason}; the next start of this one serves it, since it was gone back to after a quarantine"
        state = replace(state, unfit={**state.unfit, label(event.version): text})
        return Step(state, (Say(text), *(() if state.serving is None else (Inspect(state.serving.version),))))
    return Step(replace(state, replacement=event.reason), (Say(event.reason),))


def _note_swap(state: DraftState, event: Swapped, patience: Patience) -> Step:
    return Step(replace(state, swap_ms=event.swap_ms), (Count("swaps"),))


def _retire(state: DraftState, event: Quarantined, patience: Patience) -> Step:
    memory = state.memory.with_refused(event.version, event.reason).with_reported(label(event.version))
    state = replace(off(state, f"draft {event.version.number} was quarantined"), memory=memory)
    return Step(state, (SetSpeculation(False), Remember()))


def _note_report(state: DraftState, event: Reported, patience: Patience) -> Step:
    return Step(replace(state, memory=state.memory.with_reported(event.name)), (Remember(),))


PHASES = tuple(Phase)
# A row for each event, a column for each phase; None is what can't happen.
TABLE: Mapping[type[Event], tuple[Rule | None, ...]] = {
    # in:          EMPTY, UNPROVEN, PROVING, SERVING, CHECKING, TRYING, REVERTING, OFF
    Ticked: (_look, _judge, None, _watch, None, None, _put_back_again, _look),
    Switched: (_switch, _switch, _switch_on_trial, _switch, _switch_on_trial, _switch_on_trial, _switch, _switch),
    Named: (_consider, _consider, None, _consider, None, None, _wait, _consider),
    Fetched: (None, _try, None, _try, None, None, None, _try),
    MadeForAnother: (_leave_alone, _leave_alone, None, _leave_alone, None, None, None, _leave_alone),
    NeedsReplica: (_hand_over, _hand_over, None, _hand_over, None, None, None, _hand_over),
    NoRoom: (None, trials.postpone, None, trials.postpone, None, None, None, trials.postpone),
    Swapped: (None, None, None, None, None, _note_swap, None, None),
    Passed: (None, None, trials.accept, None, None, trials.accept, None, None),
    Failed: (
        trials.refuse, trials.refuse, trials.refuse_serving, trials.refuse, None, trials.refuse_candidate, None,
        trials.refuse,
    ),
    Undecided: (
        None, None, trials.postpone_serving, None, trials.leave_unchecked, trials.postpone_candidate, None, None,
    ),
    CalledOff: (None, None, trials.resume_unproven, None, trials.resume_serving, trials.give_back, None, None),
    Checked: (None, None, None, None, trials.conclude, None, None, None),
    Restored: (None, None, None, None, None, None, trials.restore, None),
    Exhausted: (None, None, None, None, None, None, trials.give_up, None),
    Late: (None, None, None, None, None, None, trials.be_late, None),
    Quarantined: (None, _retire, None, _retire, None, None, None, None),
    Reported: (_note_report, _note_report, None, _note_report, None, None, _note_report, _note_report),
}  # fmt: skip
