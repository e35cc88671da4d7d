"""What all tables of comparisons keep to, and what they draw from."""

import json

import pytest

from models import catalog
from tasks.measure.compare_methods import choose_rows
from tasks.measure.comparisons import Row, commonest, draw, families, first_by_domain, in_turn, load_comparison, up_to
from tasks.stages import methods_in

# Whose rows are not the methods of the family that they are called after, but some of them or others.
OTHERS = {"drafts", "sources", "verify"}


@pytest.mark.parametrize("family", families())
def test_rows_are_told_apart_travel_as_json_and_sweep_a_rate_where_one_names_it(family: str) -> None:
    comparison = load_comparison(family)
    rows = choose_rows(comparison, 1.0)  # which refuses two of one name, and a missing baseline
    assert [Row(*row) for row in json.loads(json.dumps(rows))] == rows
    rates = [row.settings.get("learning_rate") for row in rows]
    assert hasattr(comparison, "tune") == any(rates) == ("rate" in comparison.COLUMNS)


@pytest.mark.parametrize("family", sorted({*families()} & {*catalog.families()} - OTHERS))
def test_every_method_of_a_family_has_a_row(family: str) -> None:
    named = methods_in([row.settings for row in load_comparison(family).rows(1.0)])
    assert {f"models.{family}.{name}" for name in catalog.names(family)} <= {*named}


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
