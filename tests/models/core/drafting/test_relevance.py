"""BM25 by hand, and at its edges."""

import math

import pytest

from models.core.drafting.relevance import score


def test_a_score_by_hand() -> None:
    # Token 7 stands in one of three parts, twice; token 8 in two. Parts are 2, 2 and 5 long, 3 on average.
    parts = [[1, 8], [2, 3], [7, 7, 8, 4, 5]]
    rare, common = math.log(1 + 2.5 / 1.5), math.log(1 + 1.5 / 2.5)
    short, long = 1.2 * (0.25 + 0.75 * 2 / 3), 1.2 * (0.25 + 0.75 * 5 / 3)
    wanted = [common * 2.2 / (1 + short), 0.0, rare * 2 * 2.2 / (2 + long) + common * 2.2 / (1 + long)]
    assert score(parts, [8, 7, 8]) == pytest.approx(wanted)


def test_what_every_part_holds_says_little_and_never_the_contrary() -> None:
    everywhere, once = score([[1, 2], [1, 3], [1, 4]], [1]), score([[1, 2], [1, 3], [1, 4]], [3])
    assert 0 < max(everywhere) < once[1] and once[0] == once[2] == 0


@pytest.mark.parametrize(("parts", "question", "wanted"), [([], [1], []), ([[1, 2]], [], [0.0]), ([[]], [1], [0.0])])
def test_nothing_to_score_or_to_ask_is_no_error(
    parts: list[list[int]], question: list[int], wanted: list[float]
) -> None:
    assert score(parts, question) == wanted
