from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from models.core.drafting.multi_draft import draw, exact_outcome, most_kept
from models.core.drafting.proposal import Siblings
from models.verify import reject_in_turn

WAYS: tuple[Siblings, ...] = ("independent", "without replacement", "certain", "certain but one")
Q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


def random_law(rng: torch.Generator, size: int, power: int) -> Tensor:
    weights = torch.rand(size, generator=rng, dtype=torch.float64) ** power
    return weights / weights.sum()


def chances(q: Tensor, num_siblings: int, siblings: Siblings) -> dict[tuple[int, ...], float]:
    """Return every tuple of siblings with its chance, written down anew."""
    order = q.argsort(descending=True).tolist()
    found = {}
    for tokens in product(range(len(q)), repeat=num_siblings):
        num_certain = {"certain": num_siblings, "certain but one": num_siblings - 1}.get(siblings, 0)
        chance, left = float(list(tokens[:num_certain]) == order[:num_certain]), 1.0
        for place, token in enumerate(tokens):
            known = tokens[:place]
            if siblings != "independent" and token in known:
                chance = 0.0
            if place >= num_certain:
                left = 1.0 if siblings == "independent" else 1 - sum(float(q[one]) for one in known)
                chance *= float(q[token]) / left if left > 0 else 0.0
        found[tokens] = chance
    return {tokens: chance for tokens, chance in found.items() if chance > 0}


def transported(p: Tensor, drawn: dict[tuple[int, ...], float]) -> float:
    """Solve the program: the most mass that can go from tuples of siblings to tokens in them, within p."""
    edges = [(number, token) for number, tokens in enumerate(drawn) for token in set(tokens)]
    limits = np.zeros((len(drawn) + len(p), len(edges)))
    for column, (number, token) in enumerate(edges):
        limits[number, column] = limits[len(drawn) + token, column] = 1
    solved = linprog(-np.ones(len(edges)), A_ub=limits, b_ub=[*drawn.values(), *p.tolist()])
    return float(-solved.fun)


LAWS = [tuple(random_law(torch.Generator().manual_seed(seed), 4, power) for seed in (0, 1)) for power in (1, 3, 6)]
WITH_ZEROES = torch.tensor([[0.0, 0.0, 0.4, 0.6, 0.0], [0.5, 0.0, 0.22, 0.1, 0.18]], dtype=torch.float64)


@pytest.mark.parametrize("num_siblings", [1, 2, 3])
@pytest.mark.parametrize("siblings", WAYS)
def test_the_bound_is_what_the_linear_program_finds(siblings: Siblings, num_siblings: int) -> None:
    for p, q in (*LAWS, WITH_ZEROES):
        bound = float(most_kept(p[None], q[None], num_siblings, siblings))
        assert bound == pytest.approx(transported(p, chances(q, num_siblings, siblings)), abs=1e-6)


@pytest.mark.parametrize("power", [1, 10, 40])
def test_the_integral_is_the_sum_over_all_draws_however_peaked_the_draft_is(power: int) -> None:
    rng = torch.Generator().manual_seed(power)
    p, q = random_law(rng, 24, 4), random_law(rng, 24, power)
    tokens = torch.cartesian_prod(*[torch.arange(24)] * 3)
    first, second, third = q[tokens].unbind(1)
    chance = first * second / (1 - first) * third / (1 - first - second)
    chance[(tokens[:, :1] == tokens[:, 1:]).any(1) | (tokens[:, 1] == tokens[:, 2])] = 0
    rank = (q / p).argsort(descending=True).argsort()
    all_inside = torch.zeros(24, dtype=torch.float64).scatter_add(0, rank[tokens].max(dim=1).values, chance).cumsum(0)
    wanted = 1 + (p[rank.argsort()].cumsum(0) - all_inside).min()
    assert float(most_kept(p[None], q[None], 3, "without replacement")) == pytest.approx(float(wanted), abs=1e-6)


@pytest.mark.parametrize("siblings", WAYS)
def test_siblings_come_as_often_as_they_should_and_say_what_they_were_drawn_from(siblings: Siblings) -> None:
    drawn = draw(Q.expand(40_000, -1), 2, siblings, torch.Generator().manual_seed(3))
    pairs = (4 * drawn.token_ids[:, 0] + drawn.token_ids[:, 1]).bincount(minlength=16) / 40_000
    for tokens, chance in chances(Q, 2, siblings).items():
        assert float(pairs[4 * tokens[0] + tokens[1]]) == pytest.approx(chance, abs=0.01)  # 4 standard errors
    first, second = drawn.token_ids[0].tolist()
    if siblings == "independent":
        assert torch.equal(drawn.q, Q.expand_as(drawn.q))
    else:
        assert drawn.q[0, 1, first] == 0
    if siblings.startswith("certain"):
        assert drawn.q[0, 0].tolist() == [1, 0, 0, 0]
    assert float(drawn.q[0, 1, second]) > 0


@pytest.mark.parametrize(
    ("num_siblings", "siblings", "fault"),
    [(0, "independent", "num_siblings must be at least 1, got 0"), (3, "without replacement", "3 different .* from 2")],
)
def test_siblings_that_there_are_not_are_refused(num_siblings: int, siblings: Siblings, fault: str) -> None:
    q = torch.tensor([[0.5, 0.5, 0.0]])
    with pytest.raises(ValueError, match=fault):
        draw(q, num_siblings, siblings, torch.Generator())
    with pytest.raises(ValueError, match=fault):
        most_kept(q, q, num_siblings, siblings)


def test_laws_of_different_vocabularies_and_too_many_outcomes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one shape, got \[1, 4\] and \[1, 3\]"):
        most_kept(Q[None], torch.ones(1, 3) / 3, 1, "independent")
    with pytest.raises(ValueError, match=r"2000\^2 outcomes are too many"):
        exact_outcome(reject_in_turn, torch.ones(2000), torch.ones(2000), 2, "independent")
