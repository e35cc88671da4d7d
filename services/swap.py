"""What a replica does about what happens to its drafts: pure functions, one for each event, and what they ask for.

An event takes the state, and returns the next one and the actions that follow; it touches nothing.
services/reconciler.py executes the actions, each of which may bring the next event.

    started with a draft ──► UNPROVEN ──its probation is due──► PROVING ──passed──► SERVING
                                ▲  ▲                               │ │
                                │  └──────────undecided────────────┘ └──failed──► REVERTING
                                │
                                └──another draft restored──┐
    UNPROVEN, SERVING, OFF ──a champion was fetched──► TRYING ──passed──► SERVING
                                                           └──failed, undecided, called off──► REVERTING
    SERVING ──the canary prompts are due──► CHECKING ──the pair is broken──► REVERTING
                                                └──anything else──► SERVING
    REVERTING ──the last good draft restored──► SERVING, or UNPROVEN if it was not proven here, or is a control
    REVERTING ──none can be──► OFF; not in time ──► REVERTING, with speculation off
    UNPROVEN, SERVING ──the draft was quarantined elsewhere, and there is no champion──► OFF
    started without a draft ──► EMPTY: a champion that comes needs another replica

A draft that *failed* showed a fault of its own and is refused for good. One that is *undecided* could not be tested,
because the engine failed, was too busy, or answers the golden prompts otherwise without a draft too: it is postponed,
and tried again after a wait that doubles each time. So is one that there is no memory to load, or that the engine did
not start with. The draft that a replica booted with serves on meanwhile, and another champion is followed at once.

A draft that broke while it served is loaded again and put on probation. If it breaks once more, or fails, it waits like
one that is undecided and the last good one before it is put back: what broke may be the engine. So until a draft passes
again (`fault`) none is refused for what it shows on probation.

In a fleet the last good draft is a *control* after a candidate failed: it was proven here, and is put on probation
again. If it passes, the candidate was at fault. If it fails, this replica is: the pair broke, and the last good draft
waits. If it can't be tested, its proof still holds, and nobody knows whose fault it was. Only then the fleet is told.

A version whose quarantine somebody cleared is tried like any other when it is promoted again.

Two things are no phases, since they hold in several. While an operator has speculation off (`wanted`) nothing is proven
or swapped, and a probation on its way is called off; this event alone comes at any time. A champion that can't be
swapped in, of another family, shape or K, makes the replica ask for its own `replacement`; it goes on with what it has,
and follows nothing. One that is champion again because a newer one was quarantined waits for the next start.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec

from infra.events import PAIR_BROKE, TARGET_DIFFERS
from infra.status import Phase, Proof
from infra.versions import Version, label
from models.core.evaluation.golden import Answer, Finding
from models.serving import Serve
from services.drafts import DraftState, Loaded, Postponed, without

P = ParamSpec("P")


@dataclass(frozen=True)
class Action:
    """What is to be done."""


@dataclass(frozen=True)
class OfDraft(Action):
    """What is to be done with a draft."""

    draft: Loaded


@dataclass(frozen=True)
class Count(Action):
    """Count what happened, and say it in the log if there is a text."""

    name: str
    text: str = ""


@dataclass(frozen=True)
class Say(Action):
    """Tell the log of good news."""

    text: str


@dataclass(frozen=True)
class Tell(Action):
    """Tell the orchestrator, by event."""

    event: str
    text: str


class Report(Action):
    """Tell the registry of the refusals that it doesn't know; brings `reported` for each."""


class Ask(Action):
    """Ask the registry for its champion; brings `named`."""


@dataclass(frozen=True)
class Fetch(Action):
    """Get a champion's files and check them; brings `fetched`, `unfit`, `needs_replica`, `no_room`,
    `out_of_reach` or `failed`."""

    version: Version


@dataclass(frozen=True)
class Inspect(Action):
    """Ask the registry about the served version; brings `quarantined` if it is."""

    version: Version


class Prove(OfDraft):
    """Put the served draft on probation; brings `passed`, `failed`, `undecided` or `called_off`."""


class Try(OfDraft):
    """Swap a draft in and put it on probation; brings `swapped`, and then or instead what `Prove` brings."""


class Check(OfDraft):
    """Ask the served draft the canary prompts; brings `checked`, `undecided` or `called_off`."""


class CallOff(Action):
    """End the probation or the canary that is on its way, if there is one; brings `called_off`."""


class PutBack(Action):
    """Load the first of `DraftState.fallbacks` that can be; brings `restored`, `exhausted` or `late`."""


@dataclass(frozen=True)
class SetSpeculation(Action):
    """Switch the engine's speculation."""

    on: bool


class Remember(Action):
    """Write the memory to the disk."""


LOOK: tuple[Action, ...] = (Report(), Ask())


class Step(NamedTuple):
    """The next state, and what is to be done, in its order: what an action brings comes before the action after it."""

    state: DraftState
    actions: tuple[Action, ...] = ()


Event = Callable[[DraftState, Serve], Step]
_Rule = Callable[Concatenate[DraftState, Serve, P], Step]


def _in(*phases: Phase) -> Callable[[_Rule[P]], _Rule[P]]:
    """Return the decorator of an event that happens in these phases alone; RuntimeError in another."""

    def of(rule: _Rule[P]) -> _Rule[P]:
        @wraps(rule)
        def checked(state: DraftState, serve: Serve, /, *args: P.args, **kwargs: P.kwargs) -> Step:
            if state.phase not in phases:
                raise RuntimeError(f"{rule.__name__} can't happen while a replica's draft is {state.phase}")
            return rule(state, serve, *args, **kwargs)

        return checked

    return of


IDLE = (Phase.EMPTY, Phase.UNPROVEN, Phase.SERVING, Phase.OFF)
SWAPPABLE = (Phase.UNPROVEN, Phase.SERVING, Phase.OFF)
TRIALS = (Phase.PROVING, Phase.CHECKING, Phase.TRYING)


@_in(*IDLE, Phase.REVERTING)
def ticked(state: DraftState, serve: Serve, now_s: float, in_flight: int = 0) -> Step:
    """It is time for a look, while so many requests are being answered; times are on the monotonic clock."""
    if state.phase is Phase.REVERTING:
        return Step(state, (PutBack(), Report()))
    serving = state.serving
    if state.phase is Phase.UNPROVEN and state.wanted and state.is_due(_present(serving).version, now_s):
        return Step(replace(state, phase=Phase.PROVING), (Prove(_present(serving)), *LOOK))
    if state.phase is Phase.SERVING and state.check_s is None:
        return Step(replace(state, check_s=now_s + serve.canary.period_s), LOOK)
    if state.phase is Phase.SERVING and state.check_s is not None and state.wanted and state.answers:
        waits = in_flight > serve.canary.max_in_flight and now_s < state.check_s + serve.canary.period_s
        if now_s >= state.check_s and not waits:
            return Step(replace(state, phase=Phase.CHECKING), (Check(_present(serving)), *LOOK))
    return Step(state, LOOK)


@_in(*Phase)
def switched(state: DraftState, serve: Serve, on: bool) -> Step:
    """An operator wants speculation on or off.

    A trial is called off; switched on again, it decides itself when is drafted, and `called_off` does once it ended.
    """
    state = replace(state, wanted=on, control=state.control if on else "")
    if state.phase not in TRIALS:
        return Step(state, (SetSpeculation(state.speculates),))
    return Step(state, () if on else (CallOff(), SetSpeculation(False)))


@_in(*IDLE, Phase.REVERTING)
def named(state: DraftState, serve: Serve, champion: Version | None, now_s: float) -> Step:
    """The registry named its champion, or that there is none; the last good draft is put back first."""
    if state.phase is Phase.REVERTING:
        return Step(state)
    serving = None if state.serving is None else state.serving.version
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
    if state.swapped_s is not None and now_s - state.swapped_s < serve.min_swap_interval_s:
        return Step(state, (*cleared, Count("deferred")))
    return Step(state, (*cleared, Fetch(champion)) if state.is_due(champion, now_s) else cleared)


@_in(*SWAPPABLE)
def fetched(state: DraftState, serve: Serve, draft: Loaded, now_s: float) -> Step:
    """A champion's files are here, good, and can be swapped in."""
    if not state.wanted:  # it was switched off meanwhile
        return Step(state)
    return Step(replace(state, phase=Phase.TRYING, candidate=draft, swapped_s=now_s), (Try(draft),))


@_in(*IDLE)
def unfit(state: DraftState, serve: Serve, version: Version, reason: str) -> Step:
    """A champion is another target's, so another service may want it."""
    left = {**state.unfit, label(version): reason}
    return Step(replace(state, unfit=left), (Count("unfit", f"draft {version.number} does not fit: {reason}"),))


@_in(*IDLE)
def needs_replica(state: DraftState, serve: Serve, version: Version, reason: str, goes_back: bool = False) -> Step:
    """A champion is sound, and only an engine that was started with it can serve it.

    Where it `goes_back` after a quarantine, this replica answers on, without a draft if its own is what was bad.
    """
    if not goes_back:
        return Step(replace(state, replacement=reason), (Say(reason),))
    text = f"{reason}; the next start of this one serves it, since it was gone back to after a quarantine"
    state = replace(state, unfit={**state.unfit, label(version): text})
    return Step(state, (Say(text), *(() if state.serving is None else (Inspect(state.serving.version),))))


@_in(*SWAPPABLE)
def no_room(state: DraftState, serve: Serve, version: Version, reason: str, now_s: float) -> Step:
    """A champion is sound, and there is too little memory to load it beside the draft that serves."""
    return _postpone(state, serve, version, reason, now_s)


@_in(*IDLE)
def out_of_reach(state: DraftState, serve: Serve, version: Version, reason: str, now_s: float) -> Step:
    """A champion is not in the cache, and where its files lie does not answer."""
    state, (count,) = _postpone(state, serve, version, reason, now_s)
    return Step(state, (count, Count("artifacts_unavailable")))


@_in(Phase.TRYING)
def swapped(state: DraftState, serve: Serve, swap_ms: float) -> Step:
    """The engine took the candidate."""
    return Step(replace(state, swap_ms=swap_ms), (Count("swaps"),))


@_in(Phase.PROVING, Phase.TRYING)
def passed(state: DraftState, serve: Serve, proof: Proof, answers: tuple[Answer, ...] = ()) -> Step:
    """The draft on probation showed what it had to, in these answers."""
    version = (draft := _present(state.candidate or state.serving)).version
    state = replace(
        _controlled(state, True),
        phase=Phase.SERVING,
        serving=draft,
        proof=proof,
        answers=answers,
        check_s=None,
        candidate=None,
        fallback=None,
        fault=None,
        memory=state.memory.with_good(version),
        postponed=without(state.postponed, version),
    )
    text = f"draft {version.number} serves, mean accepted length {proof.tau:.3f} on probation"
    return Step(state, (Remember(), Say(text)))


@_in(*IDLE, Phase.PROVING, Phase.TRYING)
def failed(state: DraftState, serve: Serve, version: Version, reason: str, now_s: float) -> Step:
    """A draft has a fault of its own, in its files or on probation; the registry is told now or at a later tick."""
    on_trial = state.phase in TRIALS
    if state.phase is Phase.PROVING and state.proof is not None:
        after = f"after draft {state.control}" if state.control else "now"
        text = f"draft {version.number} was proven here and fails {after}: {reason}"
        state = replace(_controlled(state, False), fault=text, proof=None, answers=())
        state, actions = _pass_over_serving(state, serve, reason, now_s)
        return Step(state, (*actions, Count("broken_pairs", text), Tell(PAIR_BROKE, text)))
    if on_trial and state.fault is not None:
        return undecided(state, serve, reason, now_s)
    memory = state.memory.with_refused(version, reason)
    postponed, controls = without(state.postponed, version), without(state.controls, version)
    state = replace(state, memory=memory, postponed=postponed, controls=controls)
    told = (Count("refused", f"draft {version.number} is refused: {reason}"), Remember(), Report())
    if not on_trial:
        return Step(state, told)
    serving = None if state.phase is Phase.PROVING else state.serving
    if state.in_fleet and state.wanted and serving is not None and state.proof is not None:
        state = replace(state, control=label(version))
    state = replace(state, phase=Phase.REVERTING, candidate=None, serving=serving)
    return Step(state, (Count("reverts"), PutBack(), *told))  # the engine comes before the books


@_in(*TRIALS)
def undecided(state: DraftState, serve: Serve, reason: str, now_s: float) -> Step:
    """The draft on trial could not be tested; the trial may have ended with speculation off."""
    if state.phase is Phase.TRYING:
        return _give_up_for_now(state, serve, reason, now_s)
    if state.phase is Phase.PROVING and state.fault is not None:
        return _pass_over_serving(state, serve, reason, now_s)
    if state.phase is Phase.PROVING and state.proof is not None:
        said = Say(f"draft {_present(state.serving).version.number} could not be proven again: {reason}")
        state = replace(state, phase=Phase.SERVING, control="")
        return Step(state, (SetSpeculation(state.speculates), said))
    if state.phase is Phase.PROVING:
        proven_later = replace(state, phase=Phase.UNPROVEN)
        state, actions = _postpone(proven_later, serve, _present(state.serving).version, reason, now_s)
        return Step(state, (SetSpeculation(state.speculates), *actions))
    state = replace(state, phase=Phase.SERVING, check_s=now_s + serve.canary.period_s)
    text = f"the canary prompts were not answered: {reason}"
    return Step(state, (SetSpeculation(state.speculates), Count("canaries_undecided", text)))


@_in(*TRIALS)
def called_off(state: DraftState, serve: Serve) -> Step:
    """A probation or a canary was ended, because an operator wants speculation off."""
    if state.phase is Phase.TRYING:
        return Step(replace(state, phase=Phase.REVERTING, candidate=None), (Count("called_off"), PutBack()))
    state = replace(state, phase=Phase.SERVING if state.proof is not None else Phase.UNPROVEN)
    return Step(state, (SetSpeculation(state.speculates), Count("called_off")))


@_in(Phase.CHECKING)
def checked(state: DraftState, serve: Serve, finding: Finding, text: str, now_s: float) -> Step:
    """The canary prompts were answered by the draft that serves; the look may have ended with speculation off."""
    if finding is Finding.PAIR:
        return _reload(state, serve, text, now_s)
    state = replace(state, phase=Phase.SERVING, check_s=now_s + serve.canary.period_s)
    state = replace(state, fault=text if finding is Finding.TARGET else None)
    told: dict[Finding, tuple[Action, ...]] = {
        Finding.FELL: (Count("canaries_fell", text),),
        Finding.TARGET: (Count("target_differs", text), Tell(TARGET_DIFFERS, text)),
    }
    return Step(state, (SetSpeculation(state.speculates), Count("canaries"), *told.get(finding, ())))


@_in(Phase.REVERTING)
def restored(state: DraftState, serve: Serve, draft: Loaded) -> Step:
    """A good draft was put back; it is proven again unless it was here."""
    if state.serving is None or label(state.serving.version) != label(draft.version):
        state = replace(state, control="", proof=None, answers=())
    phase = Phase.UNPROVEN if state.proof is None or state.control else Phase.SERVING
    return Step(replace(state, phase=phase, serving=draft, fallback=None))


@_in(Phase.REVERTING)
def exhausted(state: DraftState, serve: Serve) -> Step:
    """No good draft could be put back."""
    return Step(_off(state, "no good draft"), (SetSpeculation(False),))


@_in(Phase.REVERTING)
def late(state: DraftState, serve: Serve) -> Step:
    """The last good draft was not put back in time."""
    text = "the last good draft is not back in time; speculation is off until it is"
    state = replace(state, control="", fallback="the last good draft is being put back")
    return Step(state, (SetSpeculation(False), Count("late", text)))


@_in(Phase.UNPROVEN, Phase.SERVING)
def quarantined(state: DraftState, serve: Serve, version: Version, reason: str) -> Step:
    """Somebody found the served draft bad; `version` is what the registry holds under its number now."""
    memory = state.memory.with_refused(version, reason).with_reported(label(version))
    state = replace(_off(state, f"draft {version.number} was quarantined"), memory=memory)
    return Step(state, (SetSpeculation(False), Remember()))


@_in(*IDLE, Phase.REVERTING)
def reported(state: DraftState, serve: Serve, name: str) -> Step:
    """The registry knows of a refusal, by its version's label."""
    return Step(replace(state, memory=state.memory.with_reported(name)), (Remember(),))


def _postpone(state: DraftState, serve: Serve, version: Version, reason: str, now_s: float) -> Step:
    before = state.postponed.get(label(version))
    num_attempts = 1 if before is None else before.num_attempts + 1
    postponed = Postponed.after(num_attempts, reason, serve, now_s)
    state = replace(state, postponed={**state.postponed, label(version): postponed})
    return Step(state, (Count("postponed", f"draft {version.number} is postponed: {postponed.describe(now_s)}"),))


def _give_up_for_now(state: DraftState, serve: Serve, reason: str, now_s: float) -> Step:
    version = _present(state.candidate or state.serving).version
    state, actions = _postpone(state, serve, version, reason, now_s)
    return Step(replace(state, phase=Phase.REVERTING, candidate=None), (*actions, Count("reverts"), PutBack()))


def _pass_over_serving(state: DraftState, serve: Serve, reason: str, now_s: float) -> Step:
    state, actions = _give_up_for_now(state, serve, reason, now_s)
    return Step(replace(state, serving=None, proof=None, answers=()), (SetSpeculation(False), *actions))


def _reload(state: DraftState, serve: Serve, text: str, now_s: float) -> Step:
    """Load the draft that broke again or, if it was, the last good one before it."""
    broken = _present(state.serving).version
    again = state.reloaded == label(broken)
    state = replace(state, fault=text, reloaded=label(broken), proof=None, answers=())
    said = (Count("canaries"), Count("broken_pairs", text), Tell(PAIR_BROKE, text))
    if again:
        state, actions = _pass_over_serving(state, serve, text, now_s)
        return Step(state, (*actions, *said))
    return Step(replace(state, phase=Phase.REVERTING), (SetSpeculation(False), PutBack(), *said))


def _off(state: DraftState, reason: str) -> DraftState:
    return replace(state, phase=Phase.OFF, serving=None, proof=None, answers=(), control="", fallback=reason)


def _controlled(state: DraftState, passed: bool) -> DraftState:
    """End the control that is open, if one is."""
    return replace(state, control="", controls={**state.controls, state.control: passed}) if state.control else state


def _present(draft: Loaded | None) -> Loaded:
    assert draft is not None, "this phase has a draft"
    return draft
