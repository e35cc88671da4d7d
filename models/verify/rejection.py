"""Speculative sampling: keep a drafted x with probability min(1, p(x) / q(x)), else draw from max(p − q, 0) / its sum.

When all K are kept, one more is drawn from p[:, K]: there q counts as 0, so the residual is p itself and the same line
draws both. The draft's tokens must have been drawn from q as passed; with q of other settings the output is not p's.
"""

from typing import Literal

import torch
from torch import Tensor

from models.params import BaseParams
from models.verify import Verified, check_block, emit

PAPER = "arXiv:2211.17192, algorithm 1"
LOSSLESS = True
SAMPLES = True


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["rejection"] = "rejection"


def verify(draft_tokens: Tensor, q: Tensor, p: Tensor, rng: torch.Generator, params: Params) -> Verified:
    """Verify one drafted block a row.

    Args:
        draft_tokens: [B, K] int64, drawn from q.
        q: [B, K, V].
        p: [B, K+1, V].
        rng: on the device of p.
        params: nothing to set.

    Raises:
        ValueError: the shapes don't fit each other, or a drafted token has no probability in q.
    """
    check_block(draft_tokens, q, p)
    p, q = p.float(), q.float()
    drafted = draft_tokens[..., None]
    p_drafted, q_drafted = p[:, :-1].gather(-1, drafted)[..., 0], q.gather(-1, drafted)[..., 0]
    if (q_drafted <= 0).any():
        raise ValueError("q gives a drafted token no probability; draft_tokens must be drawn from q")
    u = torch.rand(q_drafted.shape, generator=rng, device=p.device)
    return emit(draft_tokens, u * q_drafted < p_drafted, _residual_tokens(p, q, rng))


def _residual_tokens(p: Tensor, q: Tensor, rng: torch.Generator) -> Tensor:
    """Draw [B, K+1] tokens from max(p − q, 0), with q = 0 after the last drafted place."""
    residual = (p - torch.nn.functional.pad(q, (0, 0, 0, 1))).clamp(min=0)
    # p = q leaves nothing, and also never rejects; rounding can, and then p is as good.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)
    return torch.multinomial(residual.flatten(0, 1), 1, generator=rng).view(p.shape[:2])
