"""Which replica may load which draft, and when: the rows of a fleet, events, and which rows follow from which.

    canary ──proven──► tested ──pause──► wave 1 ──pause──► wave 2 ──► … ──► good, for every replica
       └──failed──► the last good draft again ──proven──► the candidate is refused, for every replica
                                              └──failed──► another canary

A fleet is what follows one registry for one target: replicas of a service, or attached vLLM servers. A new champion is
its *candidate*. One replica, the canary, gets it first: its probation must pass there, and the post-promotion test on
what it serves, which is waited for. Then come waves, each when all replicas of the one before have the candidate or
left the rollout.

A replica in which the candidate fails leaves, and goes back to its last good draft, which is the *control*: it was
proven there, and must pass the same probation again before the failure is told. If it passes on the canary, the
candidate is refused at once. If it fails, the replica is sick, and another canary tries the candidate. Another one
tries also where nothing tells replica and candidate apart: there was no last good draft or it could not be tested, the
replica was lost while it loaded, or the files were bad and never loaded. When a canary and one more replica fail so,
the candidate is refused, for it may be what broke them. In waves it is refused when more than half of those whose turn
came failed; the sick do not count there, until more than half of the fleet left. One replica alone refuses what fails
there, unless it is sick.

All that is known is in the rows, so whoever reads them next decides the same: no process has to stay. Whatever was good
once may be loaded at once, so the way back has no waves. Times are by the clock of `infra.rollout_store`'s database.
"""

from collections.abc import Mapping
from math import ceil
from typing import Literal

from pydantic import Field

from models.types import Frozen, RolloutParams

KEPT_LABELS = 16  # of drafts that were good, and of those that were refused
CANARY = 0


class DraftCounts(Frozen):
    """What a server's metrics count since its draft serves: verification steps, and tokens that were accepted.

    `per_position` says of each place of a draft in how many steps it was accepted.
    """

    steps: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...]

    def told(self) -> str:
        if not self.steps:
            return "nothing was drafted since it serves"
        places = ", ".join(f"{count / self.steps:.2f}" for count in self.per_position)
        tau = f"τ {1 + self.accepted / self.steps:.2f} over {self.steps:,} steps of all domains"
        return f"{tau}, accepted by position {places}"


class Replica(Frozen):
    """Where a replica stands. Drafts are named by their labels, number and digest.

    Attributes:
        name: an attached server's URL, or what a replica of ours is called.
        wave: in which it gets the candidate; of wave 0 is the canary.
        state: "loading" since it was told to load the candidate; "away" if it does not answer.
        version: the draft that it serves, "" before that is known.
        proven: whether that passed its probation there.
        failed: the drafts that have a fault there, and which.
        controls: of those, whether the last good draft passed right after; without those that had no control.
        logged_as: the name that rows of the query log have for it, "" before that is known.
        counts: None where its metrics are not read.
    """

    name: str
    wave: int = Field(ge=0)
    state: Literal["starting", "loading", "serving", "away"] = "starting"
    version: str = ""
    proven: bool = False
    failed: dict[str, str] = {}  # noqa: RUF012 - pydantic copies defaults
    controls: dict[str, bool] = {}  # noqa: RUF012
    logged_as: str = ""
    counts: DraftCounts | None = None

    def has(self, draft: str) -> bool:
        return self.proven and self.version == draft

    def control(self, draft: str) -> bool | None:
        """Whether its last good draft passed right after this one failed; None without a control."""
        return self.controls.get(draft) if draft in self.failed else None


class Fleet(Frozen):
    """All rows, in the order in which they try a candidate.

    Attributes:
        good: drafts that every replica may load, since their rollout ended well, the last first.
        candidate: the draft on its way, "" if there is none.
        wave: the one that is open.
        through_ms: since when all replicas of the open wave have the candidate or left, None before.
        tested: whether the candidate passed the post-promotion test.
        at_start: the candidate, if engines that run can't load it, but those that start with it.
        lost: the replicas that were lost while they loaded the candidate, and their waves.
        refused: drafts that no replica may load, and why, until somebody clears their quarantine.
        untold: those of them that the registry was not told of.
    """

    rows: tuple[Replica, ...] = ()
    good: tuple[str, ...] = ()
    candidate: str = ""
    wave: int = CANARY
    through_ms: int | None = None
    tested: bool = False
    at_start: str = ""
    lost: dict[str, int] = {}  # noqa: RUF012
    refused: dict[str, str] = {}  # noqa: RUF012
    untold: tuple[str, ...] = ()

    def row(self, name: str) -> Replica | None:
        return next((row for row in self.rows if row.name == name), None)

    @property
    def leader(self) -> str:
        """The replica that tells what is to be told once for all, "" if none answers."""
        return next((row.name for row in self.rows if row.state != "away"), "")

    def may_load(self, name: str, draft: str) -> bool:
        """Whether a replica may load a draft now; one that starts where none was ever good may start with it."""
        row = self.row(name)
        if draft in self.refused or (row is not None and draft in row.failed):
            return False
        if draft == self.at_start:
            return all(other.version in ("", draft) for other in self.rows)
        if row is None and not self.good:
            return True
        in_turn = row is not None and row.wave <= self.wave and row.name not in self.lost
        return draft in self.good or (draft == self.candidate and in_turn)

    def told(self) -> str:
        """Say how far the candidate is, "" without one."""
        if not self.candidate:
            return ""
        num_have, left = sum(row.has(self.candidate) for row in self.rows), len(self.left())
        stage = f"wave {self.wave}" if self.wave else "canary"
        if self.at_start:
            stage = "waits for the next start of all replicas, whose engines can't load it"
        elif self.wave == CANARY and num_have and not self.tested:
            stage = "canary, which waits for the post-promotion test"
        leaving = f", {left} left" if left else ""
        return f"draft {self.candidate}: {stage}, {num_have} of {len(self.rows)} replicas have it{leaving}"

    def is_through(self, row: Replica) -> bool:
        """Whether a replica has the candidate, or left the rollout."""
        return row.has(self.candidate) or self.candidate in row.failed or row.name in self.lost

    def left(self) -> dict[str, int]:
        """Return the replicas that left the candidate's rollout, and the waves in which they did."""
        return {**self.lost, **{row.name: row.wave for row in self.rows if self.candidate in row.failed}}


class Joined(Frozen):
    """These replicas are there; new ones come last, in this order."""

    names: tuple[str, ...]


class Left(Frozen):
    """These replicas ended in order, or are followed no more."""

    names: tuple[str, ...]


class Lost(Frozen):
    """The processes of these replicas, or those that followed them, are gone."""

    names: tuple[str, ...]


class Away(Frozen):
    """A replica does not answer."""

    name: str


class Seen(Frozen):
    """What a replica says of itself, see `Replica`."""

    name: str
    version: str
    proven: bool
    failed: dict[str, str]
    controls: dict[str, bool] = {}  # noqa: RUF012
    logged_as: str = ""
    counts: DraftCounts | None = None


class Loading(Frozen):
    """A replica is about to load a draft, and does if it is the candidate and its turn has come."""

    name: str
    draft: str


class Named(Frozen):
    """The registry named its champion, or "" for none."""

    champion: str


class NeedsStart(Frozen):
    """A replica found that its engine can't load a draft of this shape, or K."""

    draft: str


class Passed(Frozen):
    """A draft passed its post-promotion test."""

    draft: str


class Told(Frozen):
    """The registry quarantined a draft that the fleet refuses."""

    draft: str


class Cleared(Frozen):
    """Somebody cleared the quarantine of a draft."""

    draft: str


Event = Joined | Left | Lost | Away | Seen | Loading | Named | NeedsStart | Passed | Told | Cleared


def step(fleet: Fleet, event: Event, params: RolloutParams, now_ms: int) -> Fleet:
    """Return the fleet after an event; what it does not know, or knows already, changes nothing."""
    last = len(params.waves)
    match event:
        case Joined(names=names):
            new = (Replica(name=name, wave=last) for name in names if fleet.row(name) is None)
            fleet = _with(fleet, rows=(*fleet.rows, *new))
        case Left(names=names):
            fleet = _with(fleet, rows=tuple(row for row in fleet.rows if row.name not in names))
        case Lost(names=names):
            fleet = _note_lost(fleet, names)
            fleet = _with(fleet, rows=tuple(row for row in fleet.rows if row.name not in names))
        case Away(name=name):
            fleet = _change(_note_lost(fleet, (name,)), name, state="away")
        case Seen(name=name):
            fleet = _change(fleet, name, state="serving", counts=event.counts, **event.model_dump(exclude={"counts"}))
        case Loading(name=name, draft=draft):
            if draft == fleet.candidate and fleet.may_load(name, draft):
                fleet = _change(fleet, name, state="loading")
        case Named(champion=champion):
            fleet = _named(fleet, champion, params)
        case NeedsStart(draft=draft):
            fleet = _with(fleet, at_start=draft if draft == fleet.candidate else fleet.at_start)
        case Passed(draft=draft):
            fleet = _with(fleet, tested=fleet.tested or draft == fleet.candidate)
        case Told(draft=draft):
            fleet = _with(fleet, untold=tuple(other for other in fleet.untold if other != draft))
        case Cleared(draft=draft):
            if draft not in fleet.untold:
                rows = tuple(_update(row, failed=_without(row.failed, draft)) for row in fleet.rows)
                fleet = _with(fleet, rows=rows, refused=_without(fleet.refused, draft))
    return _settled(fleet, params, now_ms)


def _named(fleet: Fleet, champion: str, params: RolloutParams) -> Fleet:
    """Begin the rollout of another champion, or end the one that is on its way."""
    candidate = "" if champion in (*fleet.good, *fleet.refused) else champion
    if candidate == fleet.candidate:
        return fleet
    rows, total = [*fleet.rows], len(fleet.rows)
    for at, row in enumerate(rows):
        shares = (number for number, share in enumerate(params.waves, 1) if at < ceil(share * total))
        rows[at] = _update(row, wave=next(shares, len(params.waves)))
    return _anew(_with(fleet, rows=tuple(rows)), candidate)


def _settled(fleet: Fleet, params: RolloutParams, now_ms: int) -> Fleet:
    """Return what follows from the rows: a draft refused, another canary, the next wave, or a good draft."""
    fleet = _with_refusals(fleet)
    if not fleet.candidate or not fleet.rows:
        return fleet
    has_any = any(row.has(fleet.candidate) for row in fleet.rows)
    if not has_any:  # nobody is left who could show that it is sound
        fleet = _with(fleet, wave=CANARY)
    fleet = _in_turn(fleet, params)
    waiting = [row for row in fleet.rows if not fleet.is_through(row)]
    if not waiting and has_any:
        return _ended_well(fleet)
    here = [row for row in waiting if row.state != "away"]
    if not has_any and not here:  # nobody else can tell whether the draft was at fault
        fleet = _with(fleet, lost={})
    if not has_any or any(row.wave <= fleet.wave for row in here):
        return _with(fleet, through_ms=None)
    fleet = _with(fleet, through_ms=now_ms if fleet.through_ms is None else fleet.through_ms)
    waited_s = (now_ms - (fleet.through_ms or 0)) / 1000
    untested = fleet.wave == CANARY and not fleet.tested and waited_s < params.test_s
    if untested or waited_s < params.pause_s:
        return fleet
    if here:
        return _with(fleet, wave=min(row.wave for row in here), through_ms=None)
    return _ended_well(fleet)  # who is away gets it at once when it is back


def _with_refusals(fleet: Fleet) -> Fleet:
    """Refuse the drafts that a control shows to be at fault, or that failed in too many replicas to be sound."""
    blamed = {draft: why for row in reversed(fleet.rows) for draft, why in row.failed.items()}
    if fleet.lost:
        blamed.setdefault(fleet.candidate, "lost while they loaded it")
    for draft, why in blamed.items():
        if draft not in fleet.refused and (refusal := _refusal(fleet, draft, why)):
            fleet = _refuse(fleet, draft, refusal)
    return fleet


def _refusal(fleet: Fleet, draft: str, why: str) -> str:
    """Return why a draft that failed somewhere, and `why` it did, is refused everywhere; "" if it is not."""
    on_the_way = draft == fleet.candidate
    nobody_has = on_the_way and not any(row.has(draft) for row in fleet.rows)
    canaries = [row for row in fleet.rows if nobody_has and row.wave == CANARY]
    if shown := [row.failed[draft] for row in canaries if row.control(draft)]:
        return f"failed where the last good draft passed right after: {shown[0]}"
    maybe_broken = canaries if len(fleet.rows) > 1 else []  # by the draft, which nobody showed to be sound
    sick = {row.name for row in fleet.rows if row.control(draft) is False and row not in maybe_broken}
    left = fleet.left() if on_the_way else {row.name: row.wave for row in fleet.rows if draft in row.failed}
    failed = {name: wave for name, wave in left.items() if name not in sick}
    if len(fleet.rows) == len(failed) == 1 and draft in fleet.rows[0].failed and not sick:
        return why
    by_canary = on_the_way and CANARY in failed.values()
    turns = {row.name for row in fleet.rows if not on_the_way or row.wave <= fleet.wave}
    num_turns = len((turns | failed.keys()) - sick)
    if len(failed) > 1 and (by_canary or 2 * len(failed) > num_turns):
        return f"{len(failed)} of {num_turns} replicas failed: {why}"
    if len(left) > 1 and 2 * len(left) > (num_all := len(left.keys() | {row.name for row in fleet.rows})):
        return f"{len(left)} of {num_all} replicas left: {why}"  # it may be what makes them sick
    return ""


def _refuse(fleet: Fleet, draft: str, why: str) -> Fleet:
    refused = dict([*fleet.refused.items(), (draft, why)][-KEPT_LABELS:])
    good = tuple(other for other in fleet.good if other != draft)
    fleet = _with(fleet, refused=refused, untold=(*fleet.untold, draft), good=good)
    return _anew(fleet, "") if draft == fleet.candidate else fleet


def _in_turn(fleet: Fleet, params: RolloutParams) -> Fleet:
    """Give each replica that waits its wave: who is away the last one, who is behind the open one, one the canary's."""
    last = len(params.waves)

    def wave(row: Replica) -> int:
        if fleet.is_through(row):
            return row.wave
        return last if row.state == "away" else max(row.wave, fleet.wave)

    rows = [_update(row, wave=wave(row)) for row in fleet.rows]
    waiting = [at for at, row in enumerate(rows) if not fleet.is_through(row) and row.state != "away"]
    has_canary = any(row.wave == CANARY and (row.has(fleet.candidate) or at in waiting) for at, row in enumerate(rows))
    if fleet.wave == CANARY and waiting and not has_canary:
        first = min(waiting, key=lambda at: rows[at].wave)
        rows[first] = _update(rows[first], wave=CANARY)
    return _with(fleet, rows=tuple(rows))


def _note_lost(fleet: Fleet, names: tuple[str, ...]) -> Fleet:
    loading = {row.name: row.wave for row in fleet.rows if row.name in names and row.state == "loading"}
    return _with(fleet, lost={**fleet.lost, **loading}) if fleet.candidate else fleet


def _ended_well(fleet: Fleet) -> Fleet:
    return _anew(_with(fleet, good=(fleet.candidate, *fleet.good)[:KEPT_LABELS]), "")


def _anew(fleet: Fleet, candidate: str) -> Fleet:
    return _with(fleet, candidate=candidate, wave=CANARY, through_ms=None, tested=False, at_start="", lost={})


def _change(fleet: Fleet, name: str, /, **changed: object) -> Fleet:
    return _with(fleet, rows=tuple(_update(row, **changed) if row.name == name else row for row in fleet.rows))


def _update(row: Replica, /, **changed: object) -> Replica:
    return row.model_copy(update=changed)


def _with(fleet: Fleet, **changed: object) -> Fleet:
    return fleet.model_copy(update=changed)


def _without(by_draft: Mapping[str, str], draft: str) -> dict[str, str]:
    return {name: why for name, why in by_draft.items() if name != draft}
