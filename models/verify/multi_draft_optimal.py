"""The best rule there is for children that are certain but for one, the paper's greedy drafts.

The child x that was drawn, from r, is kept with min(1, p(x) / r(x)); else a token is drawn from max(p − r, 0), made to
sum to 1, and where that token is one of the certain children, that child is kept. So the emitted token follows p, and
p(certain) + Σ min(p, r) over the other tokens is kept, r being 0 at certain ones: no lossless rule keeps more of such
children (`models.core.drafting.multi_draft.most_kept`). `rejection` tries the certain ones first; then only 1 −
p(certain) is left to keep x for, and p(certain) + Σ min(p, (1 − p(certain)) r) is kept.

For children drawn from q more than one at a time the best rule is a linear program over Vᵏ outcomes; these are refused.
"""

from typing import Literal

import torch
from torch import Tensor

from models.core.drafting.proposal import Choice, Siblings
from models.params import BaseParams
from models.verify import by_choice, common_prefix, expected_of_rejection, normalised

PAPER = "arXiv:2502.18779, greedy draft sampling"
LOSSLESS = True
SAMPLES = True
SIBLINGS: tuple[Siblings, ...] = ("certain but one", "certain")


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["multi_draft_optimal"] = "multi_draft_optimal"


def choose(p: Tensor, token_ids: Tensor, q: Tensor, params: Params) -> Choice:
    """Keep the child that was drawn, or the certain one, with a single 1 in q, that is what is emitted in its place;
    ValueError if more than one child of a node was drawn."""
    certain = q.gather(2, token_ids[..., None])[..., 0] == 1
    num_drawn = int((~certain).sum(dim=1).max())
    if num_drawn > 1:
        raise ValueError(
            f"{num_drawn} children of a node were drawn; rule multi_draft_optimal wants all certain but one, rules "
            '"rejection", "spectr" and "without_replacement" take more'
        )
    law = (q * ~certain[..., None]).sum(dim=1)  # all zeros where every child is certain
    drawn = (token_ids * ~certain).sum(dim=1, keepdim=True)
    kept = (p / law.clamp(min=torch.finfo(law.dtype).tiny)).gather(1, drawn).clamp(max=1) * (~certain).any(1, True)
    residual = normalised((p - law).clamp(min=0), p)
    equal = token_ids[:, :, None] == token_ids[:, None, :]
    first = certain & ~(equal & certain[:, None, :]).tril(-1).any(dim=2)  # of equal ones the first stands for all
    instead = (1 - kept) * residual.gather(1, token_ids) * first
    rest = residual.scatter(1, token_ids, 0.0)
    return Choice(torch.where(certain, instead, kept), normalised(rest, p))


verify = by_choice(choose)
expected_accepted = expected_of_rejection
count_accepted = common_prefix  # of an only child: a rejected one is never emitted, max(p − r, 0) being 0 there
