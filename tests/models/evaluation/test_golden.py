"""The rule of equal output, case by case."""

from pathlib import Path

import pytest

from models.evaluation.golden import Golden, equal_output, load_golden, near_tie_threshold, save_golden

REFERENCE = Golden(prompt_ids=(1,), token_ids=(5, 6, 7), gaps=(2.0, 0.01, float("inf")))


@pytest.mark.parametrize(
    ("token_ids", "verdict"),
    [
        ((5, 6, 7), "equal"),
        ((5, 9, 9), "near-tie"),
        ((4, 6, 7), "different"),
        ((5, 6), "different"),
        ((5, 6, 7, 8), "different"),
    ],
)
def test_an_output_is_equal_near_a_tie_or_different(token_ids: tuple[int, ...], verdict: str) -> None:
    assert equal_output(REFERENCE, token_ids, threshold=0.05) == verdict


def test_a_gap_that_rounding_lifts_over_the_threshold_is_a_near_tie() -> None:
    golden = REFERENCE.model_copy(update={"gaps": (0.50000006, 0.5001, 2.0)})
    assert equal_output(golden, (4,), threshold=0.5) == "near-tie"
    assert equal_output(golden, (5, 9), threshold=0.5) == "different"


def test_the_threshold_is_twice_the_largest_gap_that_flipped_without_speculation() -> None:
    assert near_tie_threshold([REFERENCE], [[(5, 6, 7)], [(5, 8)]]) == pytest.approx(0.02)
    assert near_tie_threshold([REFERENCE], [[(5, 6, 7)]]) == pytest.approx(1e-3)


def test_golden_outputs_survive_a_file(tmp_path: Path) -> None:
    save_golden(tmp_path, [REFERENCE], 0.05)
    assert load_golden(tmp_path) == ([REFERENCE], 0.05)


def test_a_target_without_golden_outputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no golden.json"):
        load_golden(tmp_path)
