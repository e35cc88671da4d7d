"""What a learning curve draws, and how seeds are put together, by hand."""

from typing import Any

import pytest

from models.core.evaluation.acceptance import Trace, summarise
from models.core.learning.hidden import Sample
from tests.benchmarks.learning import DRAFTED, Point, _domain, draw, figures, points

SAMPLES = [Sample(str(number), "code", [1], [2, 3, 4]) for number in range(20)]


def row(accepted: int) -> dict[str, Any]:
    """A draft of which each step takes so many tokens."""
    acceptance = {}
    for k in DRAFTED:
        traces = [
            Trace(request_id=str(n), token_ids=(1,) * 9, drafted=(k, k), accepted=(accepted, accepted), domain="code")
            for n in range(4)
        ]
        acceptance[str(k)] = summarise(traces).model_dump(mode="json")
    return {"acceptance": acceptance, "num_tokens": 100, "train_s": 2.0, "num_steps": 7, "tokens_per_s": 50}


def test_a_seed_draws_other_requests_and_a_larger_size_holds_the_smaller_one() -> None:
    assert draw(SAMPLES, 5, 0, 3, 3) == draw(SAMPLES, 12, 0, 3, 3)[:5]
    assert {one.id for one in draw(SAMPLES, 5, 0, 3, 3)} != {one.id for one in draw(SAMPLES, 5, 1, 3, 3)}
    assert sorted(draw(SAMPLES, 20, 3, 3, 3)) == sorted(SAMPLES)


def test_longer_answers_come_from_fewer_requests_so_that_as_many_tokens_are_learnt() -> None:
    samples = [Sample(str(number), "chat", [1], [5] * (12 if number % 2 else 4)) for number in range(40)]
    drawn = {length: draw(samples, 30, 0, length, 4) for length in (4, 8, 12)}
    assert len(drawn[4]) == 30 and {len(one.completion_ids) for one in drawn[4]} == {4}
    for length in (8, 12):
        assert 120 <= sum(len(one.completion_ids) for one in drawn[length]) < 120 + length
        ids = [one.id for one in drawn[length]]
        assert ids == [one.id for one in drawn[4]][: len(ids)]
        assert max(len(one.completion_ids) for one in drawn[length]) == length
    assert len(drawn[12]) < len(drawn[8]) < 30


def test_only_sizes_up_to_a_thousand_are_learnt_with_every_seed() -> None:
    assert [(point.size, point.seed) for point in points("refresh", [1000, 4000], 2)] == [
        (1000, 0),
        (1000, 1),
        (4000, 0),
    ]
    assert Point("first draft", 250, 1).name == "first-draft-250-1"
    assert Point("first draft, answers of 80", 250, 1).name == "first-draft-answers-of-80-250-1"


def test_a_curve_is_the_mean_over_seeds_with_the_lowest_and_the_highest() -> None:
    rows = {Point("refresh", 60, 0): row(0), Point("refresh", 60, 1): row(2), Point("first draft", 250, 0): row(1)}
    curves = figures(rows, {"refresh": "code", "first draft": "chat"})["curves"]
    assert [*curves] == ["refresh", "first draft"]
    [sixty] = curves["refresh"]
    assert (sixty["size"], sixty["num_seeds"]) == (60, 2)
    for k in DRAFTED:
        found = sixty["acceptance"][str(k)]
        assert found["tau"]["value"] == 2.0
        assert found["seeds"] == [1.0, 3.0]
        assert found["per_position"] == [0.5, 0.5, *[0.0] * (k - 2)]


def test_a_domain_and_a_file_in_place_of_one_are_not_both_taken() -> None:
    with pytest.raises(ValueError, match='--data math=prompts.jsonl is learnt in place of .*; got --domain "code" too'):
        _domain(None, "code", "math=prompts.jsonl", 10, 4)  # type: ignore[arg-type]  # no benchmark is asked
