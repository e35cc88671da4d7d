"""`chain`, `static` and `dynamic` by hand; `dyspec` and `sequoia` are held to the best of all trees."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models.params import BaseParams
from models.trees import Shape, chain, dynamic, path_to, static

WIDTHS = static.Params(widths=(2, 2, 1))


@pytest.mark.parametrize(
    ("params", "size", "parents", "ranks"),
    [
        (chain.Params(), 3, (-1, 0, 1), (0, 0, 0)),
        (WIDTHS, 20, (-1, -1, 0, 0, 1, 1, 2, 3, 4, 5), (0, 1, 0, 1, 0, 1, 0, 0, 0, 0)),
        (WIDTHS, 5, (-1, -1, 0, 0, 1), (0, 1, 0, 1, 0)),
    ],
    ids=["a chain", "each level's nodes have as many children", "a level that is cut loses the last ranks first"],
)
def test_a_shape_by_hand(params: BaseParams, size: int, parents: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    method = {"chain": chain, "static": static}[params.name]
    assert method.shape(size, params) == Shape(parents, ranks)


#  After the root: a 0.6, b 0.3; after a: c 0.9; after b: d 0.5, e 0.5; after c: f 0.2, g 0.2. All else is even.
A, B, C, D, E, F, G = range(7)
LAW = {(): {A: 0.6, B: 0.3}, (A,): {C: 0.9}, (B,): {D: 0.5, E: 0.45}, (A, C): {F: 0.3, G: 0.2}}


def expand(token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
    rows = []
    for node in nodes:
        known = LAW.get(path_to(node, token_ids, parents), {})
        rest = (1 - sum(known.values())) / (20 - len(known))
        rows.append([math.log(known.get(token, rest)) for token in range(20)])
    return torch.tensor(rows)


def grown(num_tokens: int, **params: float) -> tuple[list[int], tuple[int, ...]]:
    proposal = dynamic.grow(expand, num_tokens, dynamic.Params(**{"width": 2, "max_depth": 3, **params}))
    return proposal.token_ids[0].tolist(), proposal.parents


def test_the_likeliest_paths_are_kept_wherever_they_are() -> None:
    # values: a 0.6, ac 0.54, b 0.3, acf 0.162, bd 0.15, be 0.135, acg 0.108
    assert grown(2) == ([A, C], (-1, 0))
    assert grown(3) == ([A, B, C], (-1, -1, 0))
    assert grown(5) == ([A, B, C, D, F], (-1, -1, 0, 1, 2))


def test_no_level_goes_deeper_than_is_allowed() -> None:
    assert grown(4, max_depth=1) == ([A, B], (-1, -1))


def test_nodes_that_are_hardly_ever_right_are_not_proposed() -> None:
    assert grown(9, threshold=0.25) == ([A, B, C], (-1, -1, 0))
    assert grown(9, threshold=0.7) == ([], ())
