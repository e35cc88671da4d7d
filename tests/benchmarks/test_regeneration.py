"""What a benchmark of regenerated answers compares, by hand."""

import pytest

from models.core.evaluation.paired import Score
from models.core.learning.hidden import Sample
from tests.benchmarks.regeneration import CONTINUED, SERVED, Arm, against, arms, cut


def scores(*accepted: float) -> dict[int, list[Score]]:
    return {40: [Score(id=str(place), domain="code", steps=10, accepted=one) for place, one in enumerate(accepted)]}


def test_each_number_of_answers_is_an_arm_of_its_own() -> None:
    assert [arm.name for arm in arms([])] == [arm.name for arm in arms([2, 1])][:3]
    assert arms([2, 1])[3:] == [Arm(f"{CONTINUED}, and anew × {num}", continues=True, num_anew=num) for num in (1, 2)]
    assert arms([])[0] == Arm(SERVED)


def test_an_answer_is_cut_where_its_limit_would_have_ended_it() -> None:
    assert [one.completion_ids for one in cut([Sample("a", "code", [1], [2, 3, 4])], 2)] == [[2, 3]]


def test_seeds_of_one_prompt_count_once() -> None:
    base, better = [scores(2, 4, 6)] * 2, [scores(4, 5, 9), scores(4, 7, 9)]
    told = against(base, better)["40"]
    assert told["tau"] == pytest.approx(1 + (4 + 5 + 9 + 4 + 7 + 9) / 60)
    assert told["gain"]["value"] == pytest.approx((0.2 + 0.2 + 0.3) / 3)
    assert told["gain"]["high"] - told["gain"]["low"] == pytest.approx(2 * 4.303 * (0.00333 / 3) ** 0.5, rel=0.01)
    assert against(base, base)["40"]["gain"] == {"value": 0, "low": 0, "high": 0}
