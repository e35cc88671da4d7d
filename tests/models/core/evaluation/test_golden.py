import random
from collections import Counter
from pathlib import Path

import pytest

from models.core.evaluation.golden import Golden, equal_output, load_golden, near_tie_threshold, save_golden

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


@pytest.mark.parametrize(
    ("token_ids", "gaps", "threshold"),
    [
        ((5, 6, 7), (2.0, 0.01, 5.0), 1e-3),  # no gap changed that has two ends
        ((5, 6, 7), (1.75, 0.02, 5.0), 0.375),
        ((5, 8, 7), (2.0, 0.03, 9.0), 0.06),  # it flipped by 0.04; what follows is of another text
        ((5, 6), (2.0, 0.05), 0.06),
    ],
)
def test_the_threshold_is_half_as_much_again_as_the_largest_change_of_a_gap_without_speculation(
    token_ids: tuple[int, ...], gaps: tuple[float, ...], threshold: float
) -> None:
    rerun = Golden(prompt_ids=(1,), token_ids=token_ids, gaps=gaps)
    assert near_tie_threshold([REFERENCE], [[REFERENCE], [rerun]]) == pytest.approx(threshold)


def test_the_threshold_of_a_few_prompts_holds_for_thousands() -> None:
    """What a batch adds to logits is simulated; that tokens flip at 0.375 and 0.5 is what was seen of 6,912 outputs."""
    draw = random.Random(0)

    def rerun(reference: Golden) -> Golden:
        margins = [gap + 0.125 * round(draw.gauss(0, 0.8)) for gap in reference.gaps]
        flipped = next((place for place, margin in enumerate(margins) if margin < 0), len(margins))
        token_ids = [*reference.token_ids[:flipped], *[-1] * (len(margins) - flipped)]
        return Golden(prompt_ids=(1,), token_ids=tuple(token_ids), gaps=tuple(map(abs, margins)))

    def outputs(count: int) -> list[Golden]:
        gaps = [tuple(0.125 * round(draw.expovariate(0.06)) for _ in range(40)) for _ in range(count)]
        return [Golden(prompt_ids=(1,), token_ids=tuple(range(40)), gaps=of_one) for of_one in gaps]

    golden, many = outputs(8), outputs(2000)
    threshold = near_tie_threshold(golden, [[rerun(one) for one in golden] for _ in range(3)])
    verdicts = Counter(equal_output(one, rerun(one).token_ids, threshold) for one in many)
    assert verdicts["near-tie"] > 100
    assert verdicts["different"] == 0
    assert threshold < 1  # and what is another text is told


def test_golden_outputs_survive_a_file_and_a_target_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no golden.json"):
        load_golden(tmp_path)
    save_golden(tmp_path, [REFERENCE], 0.05)
    assert load_golden(tmp_path) == ([REFERENCE], 0.05)
