import pytest

from tasks.measure.comparisons import commonest, draw, first_by_domain, in_turn, up_to


def test_a_draw_takes_domains_in_turn_cuts_and_follows_its_seed() -> None:
    documents = {"a": [[1] * 5] * 3, "b": [[2] * 50, [3]]}
    many = {"a": [[number] * 3 for number in range(50)]}
    drawn = draw(documents, 22, 10, seed=0)
    assert [len(piece) for piece in drawn] in ([5, 10, 5, 2], [5, 5, 10, 2])
    assert draw(many, 9, 9, seed=1) == draw(many, 9, 9, seed=1) != draw(many, 9, 9, seed=2)


def test_a_draw_from_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no document of two tokens in 1 domains"):
        draw({"a": [[1]]}, 10, 10, seed=0)


def test_pieces_of_a_draw_keep_their_order_and_reach_the_tokens_asked_for() -> None:
    domains = {"b": [[3, 3], []], "a": [[1, 1, 1], [2], [1]]}
    assert list(in_turn(domains.values())) == [[3, 3], [1, 1, 1], [2], [1]]
    assert up_to(domains["a"], 3) == [[1, 1, 1]] and up_to(domains["a"], 3.5) == [[1, 1, 1], [2]]
    assert first_by_domain(domains, 4, max_length=2) == {"a": [[1, 1]], "b": [[3, 3]]}
    assert commonest(domains, 2) == [1, 3] and commonest({"b": [[3, 3]], "a": [[1, 1]]}, 1) == [1]
