"""Served requests: where drafts change, what is drawn, what is summed up."""

import pytest

from infra.consent import QueryRow
from infra.views.acceptance import by_domain_and_draft, curves, from_answers, from_log, swaps
from tests.infra.rows import row


def answers(*rows: tuple[str, int, tuple[int, ...]]) -> list[dict]:
    names = ("domain", "draft_version", "drafted_per_step", "accepted_per_step")
    return [
        dict(zip(names, (domain, str(draft), (3,) * len(accepted), accepted), strict=True))
        for domain, draft, accepted in rows
    ]


def of_drafts(*drafts: int) -> list:
    return from_answers(answers(*(("chat", draft, (1,)) for draft in drafts)))


@pytest.mark.parametrize(
    ("drafts", "taken_over"),
    [
        ((), []),
        ((1, 1, 1), []),
        ((1, 2, 1, 2, 2), [(2, 2)]),  # a request of draft 1 was in flight at the swap
        ((1, 1, 2, 2, 1, 1), [(3, 2), (5, 1)]),  # rolled back
        ((1, 2, 3, 2, 3, 3, 2, 2), [(2, 2), (3, 3), (7, 2)]),
    ],
)
def test_a_swap_is_the_first_request_of_another_draft(drafts: tuple[int, ...], taken_over: list) -> None:
    assert [(swap.number, swap.draft) for swap in swaps(of_drafts(*drafts))] == taken_over


def test_a_curve_is_a_running_mean_of_steps_and_breaks_at_a_swap() -> None:
    served = from_answers(
        answers(("chat", 1, (0, 0)), ("chat", 1, (3,)), ("chat", 1, (0,)), ("code", 1, (2,)), ("chat", 2, (3,)))
    )
    drawn = curves(served, window=2)
    assert drawn["chat"] == [[(1, 1.0), (2, 2.0), (3, 2.5)], [(5, 4.0)]]
    assert drawn["code"] == [[(4, 3.0)]]


@pytest.mark.parametrize(
    ("drafts", "window", "drawn"),
    [([1] * 7, 20, [[5, 6, 7]]), ([1, 1, 1], 20, [[3]]), ([1, 1, 2, 2, 1, 1], 5, [[1, 2], [3, 4], [5, 6]])],
    ids=["a quarter", "fewer", "a draft that comes back"],
)
def test_a_curve_starts_anew_with_each_draft_when_it_has_a_quarter_of_its_requests(drafts, window, drawn) -> None:
    assert [[x for x, _ in part] for part in curves(of_drafts(*drafts), window)["chat"]] == drawn


def test_requests_are_sorted_by_domain_and_draft() -> None:
    served = from_answers(answers(("code", 2, (3, 3)), ("chat", 1, (0, 1)), ("chat", 1, (2,)), ("chat", 2, (1,))))
    found = by_domain_and_draft(served)
    assert list(found) == [("chat", 1), ("chat", 2), ("code", 2)]
    assert [request.number for request in found["chat", 1]] == [2, 3]


def test_rows_that_do_not_say_what_was_accepted_are_left_out() -> None:
    told = {"drafted": [3], "accepted": [2], "draft_version": 1, "speculating": True, "per_token_ms": 8.0, "time_ms": 5}

    def said(seq: int, **changed: object) -> QueryRow:
        return row(f"r{seq}", consent="metadata").model_copy(update={"seq": seq, **told, **changed})

    left_out = [said(2, drafted=None, accepted=None), said(3, speculating=False), said(4, draft_version=None)]
    served = from_log([said(1), *left_out, said(5, per_token_ms=4.0)])
    assert [(request.number, request.per_token_ms) for request in served] == [(1, 8.0), (5, 4.0)]
    assert [request.at for request in served] == [5, 5]
    unanswered = {"domain": "chat", "draft_version": None, "drafted_per_step": None, "accepted_per_step": None}
    assert from_answers([unanswered]) == []
