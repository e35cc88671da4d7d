from functools import partial

import pytest
import torch

from models.core.drafting.multi_draft import exact_outcome
from models.core.drafting.proposal import Proposal
from models.verify.typical import Params, choose, verify

FLAT = [0.25, 0.25, 0.25, 0.25]  # exp(−H) is 1/4: the bar is min(0.09, 0.3 / 4) = 0.075, and all pass
SURE = [0.91, 0.04, 0.04, 0.01]  # exp(−H) is 0.67: the bar is 0.09
LEANS = [0.6, 0.4, 0.0, 0.0]


@pytest.mark.parametrize(
    ("draft", "parents", "p", "path"),
    [
        ([3], (-1,), [FLAT, SURE], [0]),
        ([1], (-1,), [SURE, SURE], [-1]),
        ([0], (-1,), [SURE, SURE], [0]),
        ([2], (-1,), [[0.5, 0.5, 0.0, 0.0], FLAT], [-1]),
        ([0, 1, 1, 2], (-1, -1, 0, 1), [LEANS, SURE, FLAT, FLAT, FLAT], [1, 3]),
        ([1, 0, 2, 2], (-1, -1, 0, 1), [LEANS, SURE, SURE, FLAT, FLAT], [1, -1]),
        ([1, 0, 0], (-1, 0, 1), [SURE, FLAT, FLAT, FLAT], [-1, -1, -1]),
    ],
    ids=["all pass", "under the bar", "over the bar", "excluded", "the longest", "the likeliest of equals", "cut"],
)
def test_the_path_that_is_kept(draft, parents, p, path) -> None:
    laws = torch.tensor([p])
    verified = verify(Proposal(torch.tensor([draft]), parents), laws, torch.Generator().manual_seed(0), Params())
    assert verified.path.tolist() == [path]


@pytest.mark.parametrize("draft", [[1], []])
def test_the_token_after_a_path_is_drawn_from_the_target(draft: list[int]) -> None:
    proposal = Proposal(torch.tensor([draft] * 20_000, dtype=torch.int64), (-1,) * len(draft))
    laws = torch.tensor([[SURE, FLAT][: len(draft) + 1]] * 20_000)
    verified = verify(proposal, laws, torch.Generator().manual_seed(0), Params())
    assert (verified.tokens[:, 0].bincount(minlength=4) / 20_000).tolist() == pytest.approx(SURE, abs=0.009)


def test_what_is_lost_by_hand() -> None:
    # Tokens 0 and 1 pass, 2 does not. Emitted: q of 0 and 1, and p for the 0.2 that were not kept.
    p = torch.tensor([0.5, 0.45, 0.05], dtype=torch.float64)
    q = torch.tensor([0.1, 0.7, 0.2], dtype=torch.float64)
    outcome = exact_outcome(partial(choose, params=Params()), p, q, 1, "independent")
    assert float(outcome.kept) == pytest.approx(0.8)
    assert outcome.emitted.tolist() == pytest.approx([0.1 + 0.1, 0.7 + 0.09, 0.01])
    assert float(outcome.lost(p)) == pytest.approx(0.34)
