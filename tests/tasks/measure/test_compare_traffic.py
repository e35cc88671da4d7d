"""Before and after, by hand."""

from pathlib import Path

import pytest

from models.core.evaluation.golden import Golden, save_golden
from tasks.measure.compare_traffic import compare_acceptance, compare_outputs, output_verdicts


def row(number: int, accepted: tuple[int, ...], token_ids: tuple[int, ...] = ()) -> dict[str, object]:
    emitted = token_ids or tuple(range(1 + sum(accepted) + len(accepted)))
    return {
        "prompt_id": f"p{number}",
        "domain": "code",
        "token_ids": emitted,
        "gaps": [1.0] * len(emitted),
        "drafted_per_step": (3,) * len(accepted),
        "accepted_per_step": accepted,
    }


def test_a_gain_is_the_difference_of_the_ratios() -> None:
    before = [row(n, (0, 1)) for n in range(30)]
    after = [row(n, (2, 2)) for n in range(30)]
    comparison = compare_acceptance(before, after)["code"]
    assert comparison["before"]["tau"]["value"] == pytest.approx(1.5)
    assert comparison["gain"] == pytest.approx({"value": 1.5, "low": 1.5, "high": 1.5})
    assert comparison["relative_gain"]["value"] == pytest.approx(1.0)


def test_an_output_that_changed_away_from_a_tie_is_counted_as_different(tmp_path: Path) -> None:
    save_golden(tmp_path, [Golden(prompt_ids=(1,), token_ids=(2,), gaps=(1.0,))], threshold=0.01)
    references = [row(0, (1,), (5, 6, 7)), row(1, (1,), (5, 6, 7))]
    outputs = compare_outputs(references, [row(1, (1,), (5, 6, 8)), row(0, (1,), (5, 6, 7))], tmp_path)
    assert outputs == {"num_compared": 2, "verdicts": {"equal": 1, "different": 1}, "threshold": 0.01}


def test_a_verdict_belongs_to_its_prompt(tmp_path: Path) -> None:
    save_golden(tmp_path, [Golden(prompt_ids=(1,), token_ids=(2,), gaps=(1.0,))], threshold=0.01)
    references = [row(0, (1,), (5, 6, 7)), row(1, (1,), (5, 6, 7)) | {"gaps": [1.0, 1.0, 0.001]}]
    outputs = [row(0, (1,), (5, 9, 7)), row(1, (1,), (5, 6, 8))]
    assert output_verdicts(references, outputs, tmp_path) == {"p0": "different", "p1": "near-tie"}
