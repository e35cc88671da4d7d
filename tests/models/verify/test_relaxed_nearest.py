from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.core.drafting.multi_draft import exact_outcome
from models.core.drafting.proposal import Proposal
from models.verify.relaxed_nearest import Params, choose, expected_accepted, verify, write_neighbours

# On a line: 0 and 1 are near each other, 2 is a bit further from 1, 3 is far from all.
EMBEDDING = torch.tensor([[0.0], [1.0], [2.5], [9.0]])
P = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
Q = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)


@pytest.fixture
def neighbours(tmp_path: Path) -> Path:
    write_neighbours(EMBEDDING, 2, tmp_path / "neighbours.safetensors")
    return tmp_path / "neighbours.safetensors"


def chance_of(token: int, params: Params) -> tuple[float, list[float]]:
    """Return how often a token is kept, and what is emitted in its place."""
    choice = choose(P[None], torch.tensor([[token]]), Q[None, None], params)
    return float(choice.chances), choice.rest[0].tolist()


def test_neighbours_lend_their_probability_from_the_nearest_on(neighbours: Path) -> None:
    # Token 0 has neighbours 1 and 2, of 0.2 and 0.3.
    for delta, lent in [(0.1, 0.0), (0.2, 0.2), (0.49, 0.2), (0.51, 0.5)]:
        kept, _ = chance_of(0, Params(neighbours=neighbours, delta=delta))
        assert kept == pytest.approx((0.1 + lent) / 0.7), delta


def test_what_is_emitted_in_place_of_a_rejected_token_lacks_what_was_lent(neighbours: Path) -> None:
    # pˣ is (0.3, 0, 0.3, 0.4); less q, (0, 0, 0.2, 0.3) is left.
    _, rest = chance_of(0, Params(neighbours=neighbours, delta=0.2))
    assert rest == pytest.approx([0, 0, 0.4, 0.6])


def lost(p: Tensor, q: Tensor, params: Params) -> tuple[float, float]:
    outcome = exact_outcome(partial(choose, params=params), p, q, 1, "independent")
    return float(outcome.kept), float(outcome.lost(p))


def test_more_than_delta_may_be_lost_but_not_more_than_the_draft_differs(neighbours: Path) -> None:
    """Every token here gets 0.25 of a neighbour and is kept, so that q comes out, which is 0.4 away."""
    flat, halves = torch.full((4,), 0.25, dtype=torch.float64), torch.tensor([0.45, 0.05, 0.45, 0.05]).double()
    assert lost(flat, halves, Params(neighbours=neighbours, delta=0.3))[1] == pytest.approx(0.4)
    rng, beyond = torch.Generator().manual_seed(0), 0
    for _ in range(50):
        p, q = torch.rand(2, 4, generator=rng, dtype=torch.float64) ** 2
        p, q = p / p.sum(), q / q.sum()
        agree = float(torch.minimum(p, q).sum())
        for delta in (0.1, 0.3, 1.0):
            kept, away = lost(p, q, Params(neighbours=neighbours, delta=delta))
            assert kept >= agree - 1e-9 and away <= 1 - agree + 1e-9
            beyond += away > delta
    assert beyond > 0


def test_a_table_of_another_vocabulary_and_none_at_all_are_refused(neighbours: Path) -> None:
    proposal, p = Proposal.chain([0]), torch.full((1, 2, 6), 1 / 6)
    with pytest.raises(ValueError, match="has neighbours of 4 tokens, the target has 6"):
        verify(proposal, p, torch.Generator(), Params(neighbours=neighbours))
    with pytest.raises(ValueError, match="there is no file .*missing; write one with write_neighbours"):
        verify(proposal, p, torch.Generator(), Params(neighbours=Path("missing")))


def test_answers_of_the_target_do_not_tell_what_is_kept_for_neighbours(neighbours: Path) -> None:
    said, law = torch.tensor([[0]]), P[None, None]
    assert expected_accepted(said, law, law, Params()).tolist() == pytest.approx([1])
    with pytest.raises(ValueError, match="the target's answers don't tell"):
        expected_accepted(said, law, law, Params(neighbours=neighbours))


@pytest.mark.parametrize("num_neighbours", [0, 4])
def test_more_neighbours_than_there_are_tokens_are_refused(tmp_path: Path, num_neighbours: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to 3, got {num_neighbours}"):
        write_neighbours(EMBEDDING, num_neighbours, tmp_path / "table")
