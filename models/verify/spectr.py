"""SpecTr's k-sequential selection: keep the first of k children, drawn from one q, that passes min(1, p(x) / (ρ q(x))).

A child passes with chance β(ρ) = Σ min(q, p/ρ), one of them with 1 − (1 − β)ᵏ. If none does, the token is drawn from
what is missing of p, max(p − min(q, p/ρ) · (1 − (1 − β)ᵏ) / β, 0). That is p in all as long as ρβ is at least
1 − (1 − β)ᵏ; the smallest such ρ, which lies between 1 and k, keeps most. At least 1 − 1/e of what the best rule could.
With an only child ρ is 1 and the rule is `rejection`.
"""

from typing import Literal

import torch
from torch import Tensor

from models.core.drafting.proposal import Choice, Siblings
from models.params import BaseParams
from models.verify import by_choice, common_prefix, expected_of_rejection, normalised

PAPER = "arXiv:2310.15141, k-sequential selection"
LOSSLESS = True
SAMPLES = True
SIBLINGS: tuple[Siblings, ...] = ("independent",)
NUM_HALVINGS = 30


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["spectr"] = "spectr"


def choose(p: Tensor, token_ids: Tensor, q: Tensor, params: Params) -> Choice:
    """Keep the first child that passes; ValueError if the children of a node were drawn from different q."""
    law, num_children = q[:, 0], token_ids.shape[1]
    if not torch.equal(q, law[:, None].expand_as(q)):
        raise ValueError(
            "children of a node were drawn from different q; rule spectr wants them drawn independently from one, rule "
            '"rejection" takes others'
        )
    ratio = smallest_ratio(p, law, num_children)
    passes = torch.minimum(law, p / ratio)
    chance = passes.sum(dim=-1, keepdim=True)  # β
    each = (passes / law.clamp(min=torch.finfo(law.dtype).tiny)).gather(1, token_ids).clamp(max=1)
    reached = torch.nn.functional.pad((1 - each).cumprod(dim=1)[:, :-1], (1, 0), value=1.0)
    any_of_them = 1 - (1 - chance) ** num_children
    missing = p - passes * any_of_them / chance.clamp(min=torch.finfo(p.dtype).tiny)
    return Choice(reached * each, normalised(missing.clamp(min=0), p))


def smallest_ratio(p: Tensor, q: Tensor, num_children: int) -> Tensor:
    """Return ρ [n, 1], from 1 to k, for p and q [n, V]: ρβ(ρ) grows and 1 − (1 − β(ρ))ᵏ falls, so they meet once."""
    low, high = torch.ones_like(p[:, :1]), torch.full_like(p[:, :1], num_children)
    for _ in range(NUM_HALVINGS if num_children > 1 else 0):
        middle = (low + high) / 2
        chance = torch.minimum(q, p / middle).sum(dim=-1, keepdim=True)
        enough = middle * chance >= 1 - (1 - chance) ** num_children
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


verify = by_choice(choose)
expected_accepted = expected_of_rejection
count_accepted = common_prefix  # an only child that does not pass has p < q, and nothing of p is missing there
