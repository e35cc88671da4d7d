"""What a soak saw, and which of the six invariants of the design it breaks.

1. An answer is the target's own, or parts from it where the target itself was undecided, which is rare.
2. No answer ends as a whole one does and is none.
3. What fails beside the service (drafts, registry, query log, orchestrator) fails no request; what fails in it costs
   the requests of that time an error in OpenAI's shape or a connection, and no other. Whatever failed comes back.
4. No draft serves that was not proven, and none that was spoiled.
5. Every answer that may be logged has a row or was counted as lost, and no row is trained on twice.
6. What may not be written is nowhere.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations

from models.types import Frozen

MAX_NEAR_TIES, MAX_OF_A_PROMPT = 0.05, 0.15
GOOD = ("ok", "near tie")
# How requests may end while what answers them is killed and comes back.
EXCUSED = (*GOOD, "error frame", "429", "503", "no connection", "no answer", "broken")
# Ray, Serve, the engine and its proof, on a busy machine.
RECOVERY_S = 240.0
# Rows lie in the memory of the service for so long, at most; a kill loses them, and who counts them too.
IN_MEMORY_S = 5.0


class Answer(Frozen):
    """How a request ended, see `tests.drills.load.Load`, and what its key lets be logged; on the monotonic clock."""

    request_id: str  # as the service named it, "" if it named none
    consent: str
    began_s: float
    ended_s: float
    outcome: str
    prompt: str = ""


class Fault(Frozen):
    """What was done to the stack; one that hits what answers requests lasts until there are answers again."""

    what: str
    serves: bool  # whether it hits that
    began_s: float
    ended_s: float


class Look(Frozen):
    """What the service said of its draft."""

    at_s: float
    phase: str
    draft: int | None
    proven: bool


class Record(Frozen):
    """All that a soak saw.

    Attributes:
        spoiled: numbers of the drafts that must never serve.
        logged: id of the request to the consent of its row.
        dropped: rows that the log counted as lost.
        learned: numbers of the drafts that a refresh trained and the gate passed.
        lines: of each draft, first and last seq of the windows that it and those it goes on from were trained on.
        found: planted text that may not be written, and where it was found.
    """

    answers: tuple[Answer, ...]
    faults: tuple[Fault, ...]
    looks: tuple[Look, ...]
    spoiled: frozenset[int]
    logged: dict[str, str]
    dropped: int
    learned: frozenset[int]
    lines: tuple[tuple[tuple[int, int], ...], ...]
    found: tuple[str, ...]


def violations(record: Record) -> dict[int, list[str]]:
    """Return what breaks each invariant, by its number."""
    return {
        1: _changed(record.answers),
        2: [_told(one) for one in record.answers if one.outcome == "cut"],
        3: [_told(one) for one in record.answers if not _is_excused(one, record.faults)] + _not_back(record.faults),
        4: [f"draft {one.draft} served at {one.at_s:.1f} s" for one in record.looks if _is_unproven(one, record)],
        5: _unaccounted(record) + _trained_twice(record.lines),
        6: [*record.found, *_too_much(record)],
    }


def promoted(record: Record) -> frozenset[int]:
    """Return the drafts that a refresh trained, the gate passed and the service served as proven."""
    served = {look.draft for look in record.looks if look.phase == "serving" and look.proven}
    return record.learned & served


def _told(answer: Answer) -> str:
    return f"request {answer.request_id} at {answer.began_s:.1f} to {answer.ended_s:.1f} s: {answer.outcome}"


def _changed(answers: Iterable[Answer]) -> list[str]:
    ended = [one for one in answers if one.outcome in (*GOOD, "wrong")]
    ties = [one for one in ended if one.outcome == "near tie"]
    told = [_told(one) for one in ended if one.outcome == "wrong"]
    # A dozen prompts are asked over and over: one whose answer has a tie parts there whenever others run beside it.
    prompts = Counter(one.prompt for one in ties)
    others = len(ties) - max(prompts.values(), default=0)
    if others > max(1, MAX_NEAR_TIES * len(ended)) or len(ties) > MAX_OF_A_PROMPT * len(ended):
        told.append(f"{len(ties)} of {len(ended)} answers parted at near ties, {others} without the commonest prompt")
    return told


def _is_excused(answer: Answer, faults: Iterable[Fault]) -> bool:
    if answer.outcome in (*GOOD, "wrong", "cut"):  # the latter two belong to other invariants
        return True
    hit = any(one.serves and one.began_s <= answer.ended_s and answer.began_s <= one.ended_s for one in faults)
    return hit and answer.outcome in EXCUSED


def _not_back(faults: Iterable[Fault]) -> list[str]:
    late = [one for one in faults if one.ended_s - one.began_s >= RECOVERY_S]
    return [f"{one.what} at {one.began_s:.1f} s: not back in {RECOVERY_S:g} s" for one in late]


def _is_unproven(look: Look, record: Record) -> bool:
    return look.phase == "serving" and (not look.proven or look.draft in record.spoiled)


def _unaccounted(record: Record) -> list[str]:
    fatal = [one for one in record.faults if one.serves]

    def may_be_lost(ended_s: float) -> bool:
        return any(fault.began_s - IN_MEMORY_S <= ended_s <= fault.ended_s for fault in fatal)

    wanted = [one for one in record.answers if one.outcome in GOOD and one.consent != "none"]
    lost = [one for one in wanted if one.request_id not in record.logged and not may_be_lost(one.ended_s)]
    if len(lost) <= record.dropped:
        return []
    return [f"{len(lost)} answers have no row, {record.dropped} rows were counted as lost: {_told(lost[0])}, …"]


def _trained_twice(lines: Iterable[tuple[tuple[int, int], ...]]) -> list[str]:
    overlaps = {
        (first, second) for line in lines for first, second in combinations(sorted(line), 2) if second[0] <= first[1]
    }
    return [f"rows {second[0]} to {second[1]} overlap {first[0]} to {first[1]}" for first, second in sorted(overlaps)]


def _too_much(record: Record) -> list[str]:
    allowed = {one.request_id: one.consent for one in record.answers}
    order = ("none", "metadata", "full")
    return [
        f"request {name} was logged as {consent}, its key says {allowed[name]}"
        for name, consent in record.logged.items()
        if name in allowed and order.index(consent) > order.index(allowed[name])
    ]
