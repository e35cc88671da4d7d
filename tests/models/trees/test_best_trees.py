"""`dyspec` and `sequoia` find what trying all trees finds, and `dyspec` asks its draft in few passes."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from models.core.drafting.proposal import Proposal
from models.trees import Shape, dyspec, path_to, sequoia
from models.trees.sequoia import expected_accepted

V = 3
SEVERAL = [(0.5, 0.3, 0.1), (0.05, 0.9), (0.95,)]
Tokens = tuple[int, ...]


class Model:
    """A draft whose law after each path is seeded by it; sharp ones are nearly sure. It notes what it is asked."""

    def __init__(self, seed: int, sharpness: float) -> None:
        self.seed, self.sharpness = seed, sharpness
        self.asked: list[list[Tokens]] = []

    def law(self, path: Tokens) -> Tensor:
        rng = torch.Generator().manual_seed(self.seed * 1000 + sum(3**place * (1 + t) for place, t in enumerate(path)))
        return (self.sharpness * torch.randn(V, generator=rng, dtype=torch.float64)).log_softmax(-1)

    def value(self, path: Tokens) -> float:
        return math.exp(sum(float(self.law(path[:place])[token]) for place, token in enumerate(path)))

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        paths = [path_to(node, token_ids, parents) for node in nodes]
        self.asked.append(paths)
        return torch.stack([self.law(path) for path in paths])


def paths_of(proposal: Proposal) -> list[Tokens]:
    tokens = proposal.token_ids[0].tolist()
    return [tuple(tokens[node] for node in path) for path in proposal.paths[1:]]


@cache
def all_trees(size: int) -> set[frozenset[Tokens]]:
    """Every tree of so many nodes, as the set of its paths."""
    trees: set[frozenset[Tokens]] = {frozenset()}
    for _ in range(size):
        added = ((tree, (*node, token)) for tree in trees for node in {(), *tree} for token in range(V))
        trees = {tree | {path} for tree, path in added if path not in tree}
    return trees


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sharpness"), [(1, 1.0), (3, 0.3), (3, 4.0), (4, 1.0)])
def test_no_tree_of_as_many_nodes_as_dyspecs_is_expected_to_have_more_accepted(size: int, sharpness: float) -> None:
    trees = all_trees(size)
    for seed in range(5):
        model = Model(seed, sharpness)
        found = paths_of(dyspec.grow(model.expand, size, dyspec.Params()))
        assert len(found) == size
        values = {path: model.value(path) for tree in trees for path in tree}
        best = max(sum(map(values.__getitem__, tree)) for tree in trees)
        assert sum(model.value(path) for path in found) == pytest.approx(best)


def test_dyspecs_tree_by_hand() -> None:
    #  a 0.6, b 0.3, c 0.1; after a: a 0.9, b 0.1; all else is even. ab is worth 0.06, ba 0.1.
    law = {(): [0.6, 0.3, 0.1], (0,): [0.9, 0.1, 0.0]}

    def expand(token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        return torch.tensor([law.get(path_to(node, token_ids, parents), [1 / 3] * 3) for node in nodes]).log()

    proposal = dyspec.grow(expand, 3, dyspec.Params())
    assert (proposal.token_ids[0].tolist(), proposal.parents) == ([0, 1, 0], (-1, -1, 0))
    assert paths_of(dyspec.grow(expand, 9, dyspec.Params(threshold=0.2))) == [(0,), (1,), (0, 0)]
    assert dyspec.grow(expand, 9, dyspec.Params(threshold=0.7)).num_tokens == 0


def test_dyspecs_nodes_are_asked_about_once_and_passes_are_about_as_many_as_the_tree_is_deep() -> None:
    for seed in range(8):
        model = Model(seed, 2.0)
        proposal = dyspec.grow(model.expand, 9, dyspec.Params())
        asked = [path for one in model.asked for path in one]
        assert len(asked) == len(set(asked))
        assert proposal.depth <= len(model.asked) <= proposal.depth + 1
        least = min(model.value(path) for path in paths_of(proposal))
        above = [path for path in paths_of(proposal) if model.value(path) > least * (1 + 1e-9)]
        assert {(), *above} <= set(asked)  # else something better might have been missed
    sure = Model(0, 60.0)
    assert dyspec.grow(sure.expand, 4, dyspec.Params()).depth == len(sure.asked) == 4


def all_shapes(size: int, num_ranks: int, max_depth: int) -> Iterator[Shape]:
    """Yield each tree of that many nodes once, as the set of its nodes' rank paths, closed under parents."""
    paths = [path for depth in range(1, max_depth + 1) for path in itertools.product(range(num_ranks), repeat=depth)]
    for chosen in itertools.combinations(paths, size):
        numbers = {path: number for number, path in enumerate(chosen)}
        if all(len(path) == 1 or path[:-1] in numbers for path in chosen):
            parents = tuple(numbers.get(path[:-1], -1) for path in chosen)
            yield Shape(parents, tuple(path[-1] for path in chosen))


@pytest.mark.parametrize("acceptance", SEVERAL)
@pytest.mark.parametrize(("size", "max_depth"), [(2, 1), (5, 2), (4, 3)])
def test_no_shape_of_sequoias_size_is_expected_to_have_more_accepted(acceptance, size, max_depth) -> None:
    params = sequoia.Params(acceptance=acceptance, max_depth=max_depth)
    shape = sequoia.shape(size, params)
    assert len(shape.parents) <= size
    assert len(shape.levels) <= max_depth
    trees = [
        expected_accepted(tree, acceptance)
        for most in range(1, size + 1)
        for tree in all_shapes(most, len(acceptance), max_depth)
    ]
    assert expected_accepted(shape, acceptance) == pytest.approx(max(trees))


def test_what_a_shape_is_expected_to_have_accepted_is_worked_by_hand() -> None:
    #  two children of the root with 0.6 and 0.2, and the first one's first child with 0.6 · 0.6
    assert expected_accepted(Shape((-1, -1, 0), (0, 1, 0)), (0.6, 0.2)) == pytest.approx(0.6 + 0.2 + 0.36)


def test_of_sequoia_a_sure_draft_gets_a_chain_and_an_unsure_one_a_fan() -> None:
    assert sequoia.shape(4, sequoia.Params(acceptance=(0.9, 0.05))).parents == (-1, 0, 1, 2)
    assert sequoia.shape(4, sequoia.Params(acceptance=(0.25, 0.25, 0.25, 0.25))).parents == (-1, -1, -1, -1)
