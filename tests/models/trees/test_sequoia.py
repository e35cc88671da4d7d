"""The dynamic programme finds what trying all trees finds."""

import itertools
from collections.abc import Iterator

import pytest

from models.trees import Shape, sequoia
from models.trees.sequoia import expected_accepted

SEVERAL = [(0.6, 0.2), (0.5, 0.3, 0.1), (0.34, 0.33, 0.32), (0.05, 0.9), (0.95,)]


def all_trees(size: int, num_ranks: int, max_depth: int) -> Iterator[Shape]:
    """Yield each tree of that many nodes once, as the set of its nodes' rank paths, closed under parents."""
    paths = [path for depth in range(1, max_depth + 1) for path in itertools.product(range(num_ranks), repeat=depth)]
    for chosen in itertools.combinations(paths, size):
        numbers = {path: number for number, path in enumerate(chosen)}
        if all(len(path) == 1 or path[:-1] in numbers for path in chosen):
            parents = tuple(numbers.get(path[:-1], -1) for path in chosen)
            yield Shape(parents, tuple(path[-1] for path in chosen))


@pytest.mark.parametrize("acceptance", SEVERAL)
@pytest.mark.parametrize(("size", "max_depth"), [(1, 3), (2, 1), (3, 3), (5, 2), (4, 3)])
def test_no_tree_is_expected_to_have_more_accepted(acceptance: tuple[float, ...], size: int, max_depth: int) -> None:
    params = sequoia.Params(acceptance=acceptance, max_depth=max_depth)
    shape = sequoia.shape(size, params)
    assert len(shape.parents) <= size
    assert len(shape.levels) <= max_depth
    trees = [
        expected_accepted(tree, acceptance)
        for most in range(1, size + 1)
        for tree in all_trees(most, len(acceptance), max_depth)
    ]
    assert expected_accepted(shape, acceptance) == pytest.approx(max(trees))


def test_what_a_tree_is_expected_to_have_accepted_is_worked_by_hand() -> None:
    #  two children of the root with 0.6 and 0.2, and the first one's first child with 0.6 · 0.6
    assert expected_accepted(Shape((-1, -1, 0), (0, 1, 0)), (0.6, 0.2)) == pytest.approx(0.6 + 0.2 + 0.36)


def test_a_sure_draft_gets_a_chain_and_an_unsure_one_a_fan() -> None:
    assert sequoia.shape(4, sequoia.Params(acceptance=(0.9, 0.05))).parents == (-1, 0, 1, 2)
    assert sequoia.shape(4, sequoia.Params(acceptance=(0.25, 0.25, 0.25, 0.25))).parents == (-1, -1, -1, -1)


def test_a_large_tree_is_found_at_once() -> None:
    assert len(sequoia.shape(64, sequoia.Params()).parents) == 64
