"""What the loop waits for, and since when: one answer, found from what the home holds.

The order is that of the obstacles: what is wanted first stands first, so that removing it brings the next one up.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from infra.consent import OTHER_DOMAINS, Consent
from infra.trigger_store import LastLook, TriggerState, duration, now_ms, since
from infra.triggers import Due, Fall, Fallen, Running
from infra.versions import Version, is_usable
from models.types import Frozen

What = Literal["build", "refresh", "approval", "orchestrator", "memory", "consent", "rows", "time"]
# Whoever looks does so every few seconds, and for the first time about so long after it was started.
STALE_S, FIRST_LOOK_S = 60.0, 40.0


class Waiting(Frozen):
    """What the loop waits for, in a word and in words for people, and since when; "refresh" is one at work."""

    what: What
    words: str
    since_ms: int

    def line(self, at_ms: int) -> str:
        return f"{self.words}; for {since(self.since_ms, at_ms)}"


class Runner(Frozen):
    """The program of `redraft up` that looks whether a refresh is due, since when it waits to be started or runs."""

    started: bool
    since_ms: int


class Queue(Frozen):
    """The rows that wait for a refresh; `unlogged` are requests of late that may not be logged at all."""

    rows: Mapping[str, Counter[Consent]]
    first_ms: int | None = None
    unlogged: int = 0

    def full(self, domain: str = OTHER_DOMAINS) -> int:
        """Return how many may be trained on, of one domain or, where domains aren't told apart, of all."""
        return sum(counts["full"] for counts in self._of(domain))

    def kept_back(self, domain: str = OTHER_DOMAINS) -> int:
        logged = sum(counts.total() - counts["full"] for counts in self._of(domain))
        return logged + self.unlogged if domain == OTHER_DOMAINS else logged

    def _of(self, domain: str) -> list[Counter[Consent]]:
        return [counts for name, counts in self.rows.items() if domain in (OTHER_DOMAINS, name)]


def waiting_for(
    champion: Version | None,
    drafts: Sequence[Version],
    queue: Queue,
    trigger: TriggerState,
    made_ms: int,
    at_ms: int | None = None,
    runner: Runner | None = None,
) -> Waiting:
    """Return what the loop waits for in a home that was made at `made_ms`; drafts are newest first.

    `runner` is None where `redraft up` does not run.
    """
    at_ms = now_ms() if at_ms is None else at_ms
    if champion is None:
        return Waiting(what="build", words="a first draft: redraft build --recipe FILE", since_ms=made_ms)
    last = trigger.last_run
    if trigger.running:
        since_ms = at_ms if last is None else last.started_ms
        whys = [state.fall.told(domain) for domain, state in trigger.domains.items() if isinstance(state, Running)]
        words = f"the refresh that is running{f' ({whys[0]})' if whys else ''}"
        return Waiting(what="refresh", words=words, since_ms=since_ms)
    if (candidate := wants_approval(champion, drafts)) is not None:
        number, returns = candidate.number, candidate.lineage.returns
        which = f"which passed its gate{f' ({returns})' if returns else ''}"
        words = f"approval of draft {number}, {which}: redraft promote {number}"
        return Waiting(what="approval", words=words, since_ms=candidate.created_ms)
    look = trigger.last_look
    if look is None or abs(at_ms - look.at_ms) > STALE_S * 1000:
        if runner is not None:
            return Waiting(what="orchestrator", words=_unlooked(runner, at_ms), since_ms=runner.since_ms)
        words = "the orchestrator: nothing starts refreshes by itself; run: redraft up"
        return Waiting(what="orchestrator", words=words, since_ms=champion.created_ms if look is None else look.at_ms)
    if trigger.waits_for_memory and last is not None:
        short = f": {look.short_of_memory}" if look.short_of_memory else ", which ran short; there is room again"
        return Waiting(what="memory", words=f"memory to train in{short}", since_ms=last.ended_ms or last.started_ms)
    wanted = [(name, state) for name, state in trigger.domains.items() if isinstance(state, Fallen | Due)]
    for domain, state in sorted(wanted, key=lambda pair: (isinstance(pair[1], Fallen), pair[1].fall.since_ms)):
        return _of_domain(domain, state, queue, look, at_ms)
    return _of_schedule(queue, look, trigger, at_ms)


def wants_approval(champion: Version, drafts: Sequence[Version]) -> Version | None:
    """Return the newest draft that passed its gate against the champion and was never promoted."""
    seen = ((draft, draft.lineage) for draft in drafts)
    passed = (draft for draft, one in seen if one.gate == "passed" and one.gate_champion == champion.number)
    return next((draft for draft in passed if not draft.was_champion and is_usable(draft)), None)


def _unlooked(runner: Runner, at_ms: int) -> str:
    if not runner.started:
        return f"the service to answer; the first look whether a refresh is due comes {duration(FIRST_LOOK_S)} later"
    if (left_s := FIRST_LOOK_S - (at_ms - runner.since_ms) / 1000) > 0:
        return f"the first look whether a refresh is due, in {duration(left_s)}"
    return "the orchestrator, which has not looked whether a refresh is due; see: redraft logs runner"


def _of_domain(domain: str, state: Fallen | Due, queue: Queue, look: LastLook, at_ms: int) -> Waiting:
    fall = state.fall
    if isinstance(state, Due):
        if look.short_of_memory:
            return _because("memory", f"memory to train in: {look.short_of_memory}", domain, fall)
        which = f"takes no refresh ({look.error})" if look.error else "was asked for a refresh"
        since_ms = look.error_since_ms if look.error else None
        return _because("orchestrator", f"the orchestrator, which {which}", domain, fall, since_ms)
    total, of_domain = queue.full(), queue.full(domain)
    for num, wanted, of in ((total, look.min_rows, OTHER_DOMAINS), (of_domain, look.wanted.get(domain, 1), domain)):
        if num < wanted:
            what, words = _lacking(num, queue.kept_back(of), wanted, "" if of == OTHER_DOMAINS else f" of {of}")
            return _because(what, words, domain, fall)
    if look.within_share is not None:
        return _because("rows", _of_others(look.within_share, look, at_ms), domain, fall)
    left_s = fall.remaining_s(at_ms)
    tries = f"{fall.attempts} failed refresh{'es' * (fall.attempts != 1)}"
    return _because("time", f"time: the next refresh in {duration(left_s)}, after {tries}", domain, fall)


def _because(what: What, words: str, domain: str, fall: Fall, since_ms: int | None = None) -> Waiting:
    return Waiting(what=what, words=f"{words} ({fall.told(domain)})", since_ms=since_ms or fall.since_ms)


def _of_schedule(queue: Queue, look: LastLook, trigger: TriggerState, at_ms: int) -> Waiting:
    run = trigger.last_run
    if queue.full() < look.min_rows:
        what, words = _lacking(queue.full(), queue.kept_back(), look.min_rows, "")
        idle_ms = max(look.interval_from_ms, 0 if run is None else run.ended_ms or run.started_ms)
        return Waiting(what=what, words=words, since_ms=idle_ms if queue.first_ms is None else queue.first_ms)
    if look.within_share is not None and queue.first_ms is not None:
        return Waiting(what="rows", words=_of_others(look.within_share, look, at_ms), since_ms=queue.first_ms)
    if look.interval_s is None:
        return Waiting(what="time", words="acceptance to fall; no refresh is scheduled", since_ms=look.interval_from_ms)
    from_ms = max(look.interval_from_ms, 0 if run is None else run.started_ms)
    left_s = min(look.interval_s, max(0.0, look.interval_s - (at_ms - from_ms) / 1000))
    return Waiting(
        what="time", words=f"time: the next scheduled refresh in {duration(left_s)} at most", since_ms=from_ms
    )


def _of_others(within: int, look: LastLook, at_ms: int) -> str:
    left = since(at_ms, look.share_until_ms)
    return f"rows of other keys: {within:,} of {look.min_rows:,} are within one key's share, {left} more at most"


def _lacking(num: int, kept_back: int, wanted: int, place: str) -> tuple[What, str]:
    have = f"{num:,} of {wanted:,}"
    if num + kept_back >= wanted:
        return "consent", f"consent: {kept_back:,} requests{place} may not be trained on, and {have} may"
    return "rows", f"rows{place}: {have}"
