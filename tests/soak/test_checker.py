"""The checker of a soak finds a planted violation of each invariant, and none where there is none."""

from typing import Any

import pytest

from tests.soak.checker import Answer, Fault, Look, Record, promoted, violations


def answer(name: str, at_s: float, outcome: str = "ok", consent: str = "full", prompt: str = "") -> Answer:
    return Answer(request_id=name, consent=consent, began_s=at_s, ended_s=at_s + 1, outcome=outcome, prompt=prompt)


KILL = Fault(what="kill of the replica", serves=True, began_s=50.0, ended_s=80.0)
FULL = Fault(what="disk full", serves=False, began_s=20.0, ended_s=30.0)
SOUND = Record(
    answers=(
        *(answer(f"a{number}", number) for number in range(40)),
        answer("a49", 48.5),  # its row may have died with the replica
        answer("", 49.5, "error frame"),
        answer("", 60.0, "503"),
        answer("", 79.5, "broken"),
        answer("near", 90.0, "near tie"),
        answer("quiet", 91.0, consent="none"),
        answer("figures", 92.0, consent="metadata"),
    ),
    faults=(FULL, KILL),
    looks=(
        Look(at_s=1.0, phase="serving", draft=1, proven=True),
        Look(at_s=2.0, phase="trying", draft=9, proven=False),
        Look(at_s=3.0, phase="unproven", draft=2, proven=False),
    ),
    spoiled=frozenset({9}),
    logged={f"a{number}": "full" for number in range(38)} | {"near": "full", "figures": "metadata"},
    dropped=2,
    learned=frozenset({1, 2, 3}),
    lines=(((1, 10),), ((11, 20), (1, 10)), ((1, 20),)),
    found=(),
)


def with_answers(*more: Answer) -> dict[str, Any]:
    """Return a change that adds answers, each with its row."""
    rows = {one.request_id: one.consent for one in more if one.consent != "none"}
    return {"answers": SOUND.answers + more, "logged": SOUND.logged | rows}


def test_a_sound_record_breaks_nothing() -> None:
    assert violations(SOUND) == {number: [] for number in range(1, 7)}


def test_a_draft_counts_as_promoted_once_it_served_as_proven() -> None:
    """Draft 1 did; 2 was not proven, 3 never served, and 9 no refresh trained."""
    assert promoted(SOUND) == {1}


def parting(number: int, prompts: str = "") -> list[Answer]:
    """Return answers to one prompt, or to each its own, that parted at a near tie."""
    return [answer(f"t{n}", 95.0, "near tie", prompt=prompts and f"{prompts}{n}") for n in range(number)]


def test_one_prompt_may_part_at_its_tie_as_often_as_it_is_asked() -> None:
    assert violations(SOUND.model_copy(update=with_answers(*parting(4))))[1] == []


@pytest.mark.parametrize(
    ("invariant", "change", "told"),
    [
        (1, with_answers(answer("w", 95.0, "wrong")), "request w at 95.0 to 96.0 s: wrong"),
        (1, with_answers(*parting(3, "p")), "4 of 47 answers parted"),
        (1, with_answers(*parting(9)), "10 of 53 answers parted"),
        (2, with_answers(answer("c", 60.0, "cut")), "request c at 60.0 to 61.0 s: cut"),
        (3, with_answers(answer("b", 22.0, "503")), "503"),
        (3, with_answers(answer("b", 81.0, "broken")), "broken"),
        (3, with_answers(answer("b", 48.0, "error frame")), "error frame"),
        (3, with_answers(answer("b", 60.0, "500")), "500"),
        (3, with_answers(answer("b", 60.0, "shapeless")), "shapeless"),
        (4, {"looks": (Look(at_s=4.0, phase="serving", draft=2, proven=False),)}, "draft 2 served at 4.0 s"),
        (4, {"looks": (Look(at_s=4.0, phase="serving", draft=9, proven=True),)}, "draft 9 served at 4.0 s"),
        (5, {"dropped": 1}, "2 answers have no row, 1 rows were counted as lost: request a38"),
        (5, {"answers": (*SOUND.answers, answer("gone", 43.0))}, "3 answers have no row"),
        (3, {"faults": (FULL, KILL, Fault(what="kill of it", serves=False, began_s=100, ended_s=400))}, "not back in"),
        (5, {"lines": (((11, 20), (1, 11)),)}, "rows 11 to 20 overlap 1 to 11"),
        (5, {"lines": (((40, 50), (1, 30), (11, 20)),)}, "rows 11 to 20 overlap 1 to 30"),
        (6, {"found": ("magpie in queries.db",)}, "magpie in queries.db"),
        (6, {"logged": SOUND.logged | {"quiet": "metadata"}}, "request quiet was logged as metadata"),
        (6, {"logged": SOUND.logged | {"figures": "full"}}, "request figures was logged as full"),
    ],
)
def test_a_planted_violation_counts_for_its_invariant_alone(invariant: int, change: dict[str, Any], told: str) -> None:
    found = violations(SOUND.model_copy(update=change))
    assert [number for number, what in found.items() if what] == [invariant]
    assert len(found[invariant]) == 1
    assert told in found[invariant][0]
