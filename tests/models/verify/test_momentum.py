from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.core.drafting.draft_families import family_named
from models.core.drafting.proposal import Proposal
from models.verify import greedy
from models.verify.momentum import RESISTANCE, Params, choice, steps_along, verify
from tests.models.drafts.answered import answer_all, prompts
from tests.models.drafts.tiny import make_tiny


def test_steps_along_the_walk_are_counted_by_hand() -> None:
    walk = [1, 2, 3, 7, 8, 2, 3]
    assert [steps_along(walk, token) for token in (7, 2, 9, 8)] == [3, 1, 0, 1]  # 2 3 7 was gone; 2 was seen; 9 is new
    assert steps_along([], 4) == 0
    assert steps_along([5] * 20, 5) == 5


def laws(*chances: float) -> Tensor:
    """Logits of such chances."""
    return torch.tensor(chances).log()


def test_resistance_is_weighed_against_chance() -> None:
    # Token 0 was seen, 1 is new: 0.6 − 0.2 · 1 against 0.3, then against 0.45.
    assert choice(laws(0.6, 0.3, 0.1), [0, 2], Params(alpha=0.2)) == 0
    assert choice(laws(0.5, 0.45, 0.05), [0, 2], Params(alpha=0.2)) == 1
    # It would be the second step along the walk: 0.9 − 0.2 · 3.
    assert choice(laws(0.9, 0.05, 0.05), [2, 0, 2], Params(alpha=0.2)) == 0
    assert choice(laws(0.9, 0.08, 0.02), [2, 0, 2], Params(alpha=0.3)) == 1
    assert RESISTANCE[5] * 0.2 > 1  # above any chance: no five tokens come twice while a candidate is new


@pytest.mark.parametrize("params", [Params(alpha=0.0), Params(num_candidates=1)])
def test_without_resistance_or_choice_it_is_greedy_decoding(params: Params) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 4, 6, generator=rng)
    proposal = Proposal(torch.randint(6, (50, 3), generator=rng), (-1, 0, -1))
    texts = torch.randint(6, (50, 9), generator=rng).tolist()
    found, wanted = verify(proposal, logits, rng, params, texts), greedy.verify(proposal, logits, rng, greedy.Params())
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.path, wanted.path)


def test_a_tree_is_kept_as_far_as_it_is_what_comes() -> None:
    """Everywhere 0 has 0.5 and 1 has 0.45; after [0, 2] that makes 1, and after that 0: 0.3 against 0.25."""
    logits = laws(0.5, 0.45, 0.05).expand(1, 4, 3)
    proposal = Proposal(torch.tensor([[0, 1, 0]]), (-1, -1, 1))
    found = verify(proposal, logits, torch.Generator(), Params(), [[0, 2]])
    assert found.path.tolist() == [[1, 2]]
    assert found.tokens[0, :2].tolist() == [1, 0]
    wanted = choice(logits[0, 0], [0, 2, 1, 0], Params())
    assert int(found.tokens[0, 2]) == wanted


@pytest.mark.slow
def test_a_draft_changes_nothing_of_what_comes(tiny_target: Path) -> None:
    rule = Params(alpha=0.4)
    plain = answer_all(tiny_target, None, prompts(4), num_draft_tokens=0, verify_greedy=rule)
    draft = make_tiny(family_named("lm"), tiny_target)
    found = answer_all(tiny_target, draft, prompts(4), num_draft_tokens=3, verify_greedy=rule)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    likeliest = answer_all(tiny_target, None, prompts(4), num_draft_tokens=0)
    assert [one.token_ids for one in found] != [one.token_ids for one in likeliest]
    assert sum(sum(one.drafted) for one in found) > 0


def test_texts_of_another_number_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="a text for each of 1 blocks, got 2"):
        verify(Proposal.chain([1]), torch.zeros(1, 2, 4), torch.Generator(), Params(), [[1], [2]])
