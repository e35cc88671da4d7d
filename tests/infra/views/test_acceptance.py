"""Served requests: where drafts change, what is drawn, what is summed up."""

import pytest

from infra.consent import QueryRow
from infra.views.acceptance import by_domain_and_draft, curves, from_answers, from_log, swaps


def answers(*rows: tuple[str, int, tuple[int, ...]]) -> list[dict]:
    return [
        {
            "domain": domain,
            "draft_version": str(draft),
            "drafted_per_step": (3,) * len(accepted),
            "accepted_per_step": accepted,
        }
        for domain, draft, accepted in rows
    ]


def of_drafts(*drafts: int) -> list:
    return from_answers(answers(*(("chat", draft, (1,)) for draft in drafts)))


@pytest.mark.parametrize(
    ("drafts", "taken_over"),
    [
        ((), []),
        ((1, 1, 1), []),
        ((1, 1, 2, 2), [(3, 2)]),
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


def test_a_curve_starts_when_its_mean_has_a_quarter_of_its_requests() -> None:
    assert [x for x, _ in curves(of_drafts(*[1] * 7), window=20)["chat"][0]] == [5, 6, 7]
    assert [x for x, _ in curves(of_drafts(1, 1, 1), window=20)["chat"][0]] == [3]


def test_a_draft_that_comes_back_starts_a_curve_of_its_own() -> None:
    drawn = curves(of_drafts(1, 1, 2, 2, 1, 1), window=5)
    assert [[x for x, _ in part] for part in drawn["chat"]] == [[1, 2], [3, 4], [5, 6]]


def test_requests_are_sorted_by_domain_and_draft() -> None:
    served = from_answers(answers(("code", 2, (3, 3)), ("chat", 1, (0, 1)), ("chat", 1, (2,)), ("chat", 2, (1,))))
    found = by_domain_and_draft(served)
    assert list(found) == [("chat", 1), ("chat", 2), ("code", 2)]
    assert [request.number for request in found["chat", 1]] == [2, 3]


def test_rows_that_do_not_say_what_was_accepted_are_left_out() -> None:
    def row(seq: int, **changed: object) -> QueryRow:
        told = {"drafted": [3], "accepted": [2], "draft_version": 1, "speculating": True, "per_token_ms": 8.0}
        fixed = {"time_ms": 0, "domain": "chat", "consent": "metadata", "scrubber_revision": 1, "target_version": 1}
        return QueryRow(**{"seq": seq, "id": f"r{seq}", "finish_reason": "stop", **fixed, **told, **changed})

    without = {"drafted": None, "accepted": None}
    rows = [row(1), row(2, **without), row(3, speculating=False), row(4, draft_version=None), row(5, per_token_ms=4.0)]
    served = from_log(rows)
    assert [request.number for request in served] == [1, 5]
    assert [request.at for request in from_log([row(7, time_ms=1_700_000_000_000)])] == [1_700_000_000_000]
    assert [request.per_token_ms for request in served] == [8.0, 4.0]
    unanswered = {"domain": "chat", "draft_version": None, "drafted_per_step": None, "accepted_per_step": None}
    assert from_answers([unanswered]) == []
