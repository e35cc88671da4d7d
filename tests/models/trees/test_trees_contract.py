"""Every tree keeps to its budget, is a tree of distinct siblings, and proposes what its draft says."""

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from models import catalog
from models.trees import Shape, lay_out, merge

TREES = [catalog.load("trees", name) for name in catalog.names("trees")]
V = 30


def law(path: Sequence[int]) -> Tensor:
    """[V] log-probabilities after some tokens, seeded by them."""
    rng = torch.Generator().manual_seed(hash(tuple(path)) % 2**31)
    return (2 * torch.randn(V, generator=rng)).log_softmax(-1)


class Model:
    """A draft, which notes how large the tree was that it was asked about."""

    def __init__(self) -> None:
        self.most = 0

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        above = {node for asked in nodes for node in path_to(asked, parents)}
        self.most = max(self.most, len(above))
        return torch.stack([law([token_ids[node] for node in path_to(asked, parents)]) for asked in nodes])


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16])
def test_a_tree_keeps_to_its_budget_and_its_siblings_differ(tree: ModuleType, num_tokens: int) -> None:
    model = Model()
    proposal = tree.grow(model.expand, num_tokens, tree.Params())
    assert 1 <= proposal.num_tokens <= num_tokens
    assert proposal.q is None
    tokens = proposal.token_ids[0].tolist()
    assert len({*zip(proposal.parents, tokens, strict=True)}) == proposal.num_tokens
    assert list(proposal.parents) == sorted(proposal.parents)  # level order
    assert model.most <= num_tokens  # so that a draft's cache holds what the target's does
    if not tree.BRANCHES:
        assert proposal.depth == num_tokens


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
def test_children_are_the_likeliest_tokens_after_their_path(tree: ModuleType) -> None:
    proposal = tree.grow(Model().expand, 12, tree.Params())
    tokens = proposal.token_ids[0].tolist()
    for row, path in enumerate(proposal.paths):
        children = [tokens[node] for node, parent in enumerate(proposal.parents) if parent == row - 1]
        likeliest = law([tokens[node] for node in path]).argsort(descending=True).tolist()
        assert children == likeliest[: len(children)]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_what_a_draft_can_not_say_is_not_proposed(tree: ModuleType, depth: int) -> None:
    """It can say two tokens after each node, and nothing from a depth on."""

    def expand(token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        said = torch.full((len(nodes), V), float("-inf"))
        for row, node in enumerate(nodes):
            if len(path_to(node, parents)) < depth:
                said[row, 4], said[row, 9] = -0.2, -1.7
        return said

    proposal = tree.grow(expand, 12, tree.Params())
    assert proposal.depth == depth
    assert set(proposal.token_ids[0].tolist()) <= {4, 9}
    if tree.BRANCHES and depth:
        assert proposal.token_ids[0].tolist()[:2] == [4, 9]


@pytest.mark.parametrize("tree", [tree for tree in TREES if hasattr(tree, "shape")], ids=lambda tree: tree.__name__)
def test_a_fixed_tree_has_the_shape_that_it_says(tree: ModuleType) -> None:
    shape = tree.shape(9, tree.Params())
    proposal = tree.grow(Model().expand, 9, tree.Params())
    assert proposal.parents == shape.parents
    assert tree.shape(0, tree.Params()) == Shape((), ())


def test_the_commonest_beginnings_are_merged_and_equally_common_ones_are_shorter_first() -> None:
    found = [[1, 2, 3], [4, 5], [1, 6]]
    assert merge(found, 9) == ([1, 4, 2, 5, 6, 3], (-1, -1, 0, 1, 0, 2))
    assert merge(found, 2) == ([1, 4], (-1, -1))
    assert merge([], 3) == ([], ())
    assert merge([[]], 3) == ([], ())


def test_nodes_are_read_with_their_paths_after_what_is_certain() -> None:
    tokens, parents = [10, 11, 12, 13, 14], [-1, -1, 0, 2, 1]
    assert lay_out([7, 8], tokens, parents, [3, -1]) == ([7, 8, 10, 12, 13], [-1, 0, 1, 2, 3], [4, 1])
    assert lay_out([8], tokens, parents, [4, 0]) == ([8, 10, 11, 14], [-1, 0, 0, 2], [3, 1])
    assert lay_out([8], [], [], [-1]) == ([8], [-1], [0])
