"""Speculative sampling: keep a drafted x with probability min(1, p(x) / q(x)), else draw from max(p − q, 0) / its sum.

Where a node has several children they are tried in turn, each against what the one before it left: p becomes the
residual after a rejection (SpecInfer's multi-round sampling). Each child must have been drawn from its own q given the
children before it: independently from one q, without replacement from what is left of it, or with certainty.
Where the path ends, one more token is drawn from what is left of p, which after the last node is all of it.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from models.params import BaseParams
from models.proposal import Proposal
from models.verify import Verified, check_block, common_prefix, emit

PAPER = "arXiv:2211.17192, algorithm 1; trees: arXiv:2305.09781, algorithm 2"
LOSSLESS = True
SAMPLES = True


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["rejection"] = "rejection"


def verify(proposal: Proposal, p: Tensor, rng: torch.Generator, params: Params) -> Verified:
    """Verify one drafted tree a block.

    Args:
        proposal: [B, N], drawn from its q; with q of other settings the output is not p's.
        p: [B, N+1, V].
        rng: on the device of p.
        params: nothing to set.

    Raises:
        ValueError: p doesn't fit the proposal, or a drafted token has no probability in q.
    """
    check_block(proposal, p)
    p, q = p.float(), proposal.distributions(p.shape[-1]).float()
    drafted = proposal.token_ids[..., None]
    q_drafted = q.gather(-1, drafted)[..., 0]
    if (q_drafted <= 0).any():
        raise ValueError("q gives a drafted token no probability; each token must be drawn from its q")
    thresholds = torch.rand(q_drafted.shape, generator=rng, device=p.device) * q_drafted
    ends = torch.zeros(len(p), dtype=torch.int64, device=p.device)
    left = p[:, 0]  # of the target's distribution where each block stands, after the children that were rejected there
    for node, parent in enumerate(proposal.parents):
        here = ends == parent + 1
        if not here.any():
            continue
        kept = here & (thresholds[:, node] < left.gather(-1, drafted[:, node])[:, 0])
        rejected = torch.where(here[:, None], _residual(left, q[:, node]), left)
        left = torch.where(kept[:, None], p[:, node + 1], rejected)
        ends = torch.where(kept, node + 1, ends)
    return emit(proposal, ends, torch.multinomial(left, 1, generator=rng)[:, 0])


def expected_accepted(token_ids: Tensor, q: Tensor, p: Tensor, params: Params) -> Tensor:
    """Return how many tokens of a chain are accepted on average from each start of an answer that was drawn from p.

    Σᵢ ∏ⱼ‹ᵢ min(1, q(xⱼ)/p(xⱼ)) · Σᵥ min(pᵢ(v), qᵢ(v)), x being the answer: a step that goes on past x was drafted x and
    kept it, with probability min(p(x), q(x)), where the answer has it with p(x). So the mean over answers is exact.

    Args:
        token_ids: [B, K] the answer's tokens after each start, drawn from p.
        q: [B, K, V] the draft's distribution after the tokens before it; a row of zeros where nothing is drafted.
        p: [B, K, V] the target's.
        params: nothing to set.

    Returns:
        [B] from 0 to K.
    """
    p, q = p.float(), q.float()
    p_said, q_said = (law.gather(-1, token_ids[..., None])[..., 0] for law in (p, q))
    goes_on = (q_said / p_said.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1).cumprod(dim=-1)
    reached = torch.nn.functional.pad(goes_on[:, :-1], (1, 0), value=1.0)
    return (reached * torch.minimum(p, q).sum(dim=-1)).sum(dim=-1)


def count_accepted(drafted: Sequence[int], emitted: Sequence[int]) -> int:
    """Count a step's accepted tokens: a rejected one is never emitted in its place, max(p − q, 0) being 0 there.

    Args:
        drafted: a chain's ids.
        emitted: what came of the step, also where a stop cut it short.
    """
    return common_prefix(drafted, emitted)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """[B, V] → max(p − q, 0), made to sum to 1."""
    residual = (p - q).clamp(min=0)
    total = residual.sum(dim=-1, keepdim=True)
    # p = q leaves nothing, and also never rejects; rounding can, and then p is as good.
    return torch.where(total > 0, residual / total, p)
