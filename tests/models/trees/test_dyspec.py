"""The greedy choice is the best of all trees, and the draft is asked in few passes."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.core.drafting.draft_families import family_named
from models.core.drafting.proposal import Proposal
from models.trees import dynamic, dyspec, path_to
from tests.models.drafts.answered import answer_all, prompts
from tests.models.drafts.tiny import make_tiny

V = 3
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
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_tree_of_as_many_nodes_is_expected_to_have_more_accepted(size: int, sharpness: float) -> None:
    trees = all_trees(size)
    for seed in range(5):
        model = Model(seed, sharpness)
        found = paths_of(dyspec.grow(model.expand, size, dyspec.Params()))
        assert len(found) == size
        values = {path: model.value(path) for tree in trees for path in tree}
        best = max(sum(map(values.__getitem__, tree)) for tree in trees)
        assert sum(model.value(path) for path in found) == pytest.approx(best)


def test_a_tree_of_bounded_width_and_depth_is_expected_to_have_no_more_accepted_and_here_less() -> None:
    gains = []
    for seed in range(8):
        model = Model(seed, 2.0)
        trees = (dyspec.grow(model.expand, 8, dyspec.Params()), dynamic.grow(model.expand, 8, dynamic.Params(width=2)))
        mine, bounded = (sum(model.value(path) for path in paths_of(tree)) for tree in trees)
        gains.append(mine - bounded)
    assert min(gains) > -1e-9 and max(gains) > 0.01


def test_a_tree_by_hand() -> None:
    #  a 0.6, b 0.3, c 0.1; after a: a 0.9, b 0.1; all else is even. ab is worth 0.06, ba 0.1.
    law = {(): [0.6, 0.3, 0.1], (0,): [0.9, 0.1, 0.0]}

    def expand(token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        return torch.tensor([law.get(path_to(node, token_ids, parents), [1 / 3] * 3) for node in nodes]).log()

    proposal = dyspec.grow(expand, 3, dyspec.Params())
    assert (proposal.token_ids[0].tolist(), proposal.parents) == ([0, 1, 0], (-1, -1, 0))
    assert paths_of(dyspec.grow(expand, 9, dyspec.Params(threshold=0.2))) == [(0,), (1,), (0, 0)]
    assert dyspec.grow(expand, 9, dyspec.Params(threshold=0.7)).num_tokens == 0


def test_a_node_is_asked_about_once_and_passes_are_about_as_many_as_the_tree_is_deep() -> None:
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


@pytest.mark.slow
def test_the_output_is_that_without_a_draft_and_where_nothing_may_be_drafted_nothing_is(tiny_target: Path) -> None:
    draft = make_tiny(family_named("lm"), tiny_target)
    plain = answer_all(tiny_target, None, prompts(2))
    for limit in (0, 1, 6):
        found = answer_all(tiny_target, draft, prompts(2), num_draft_tokens=limit, trees={"name": "dyspec"})
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert {size for one in found for size in one.drafted} == {limit}
