import pytest

from tasks.comparisons import draw


def test_a_draw_takes_domains_in_turn_cuts_and_follows_its_seed() -> None:
    documents = {"a": [[1] * 5] * 3, "b": [[2] * 50, [3]]}
    many = {"a": [[number] * 3 for number in range(50)]}
    drawn = draw(documents, 22, 10, seed=0)
    assert [len(piece) for piece in drawn] in ([5, 10, 5, 2], [5, 5, 10, 2])
    assert draw(many, 9, 9, seed=1) == draw(many, 9, 9, seed=1) != draw(many, 9, 9, seed=2)


def test_a_draw_from_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no document of two tokens in 1 domains"):
        draw({"a": [[1]]}, 10, 10, seed=0)
