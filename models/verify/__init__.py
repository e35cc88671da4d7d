"""Verification rules: which drafted tokens the target keeps, and what it emits in their place.

Letters: B blocks, K drafted tokens a block, V vocabulary. p[:, i] is the target's and q[:, i] the draft's distribution
after the i tokens before it, at the sampling settings that are served (temperature and cuts already applied), so p and
q of greedy decoding have a single 1 a row. Each rule's module states

- `LOSSLESS`: emitted tokens follow p whatever the draft is;
- `SAMPLES`: that holds for any p, not only for one with a single 1 a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verified:
    """Outcome of one verification step.

    Attributes:
        tokens: [B, K+1] int64, the accepted tokens, one more from the target, then -1.
        num_accepted: [B] int64, from 0 to K.
    """

    tokens: Tensor
    num_accepted: Tensor


def check_block(draft_tokens: Tensor, q: Tensor, p: Tensor) -> None:
    """Raise unless the arguments of a rule fit each other.

    Args:
        draft_tokens: [B, K] int64.
        q: [B, K, V].
        p: [B, K+1, V].

    Raises:
        ValueError: a shape, the tokens' type or a token is wrong.
    """
    if draft_tokens.ndim != 2 or draft_tokens.dtype != torch.int64:
        raise ValueError(f"draft_tokens must be [B, K] int64, got {list(draft_tokens.shape)} {draft_tokens.dtype}")
    num_blocks, num_drafted = draft_tokens.shape
    if p.ndim != 3 or p.shape[:2] != (num_blocks, num_drafted + 1):
        raise ValueError(f"p must be [{num_blocks}, {num_drafted + 1}, V], got {list(p.shape)}")
    if q.shape != (num_blocks, num_drafted, p.shape[-1]):
        raise ValueError(f"q must be [{num_blocks}, {num_drafted}, {p.shape[-1]}], got {list(q.shape)}")
    if draft_tokens.numel() and not 0 <= draft_tokens.min() <= draft_tokens.max() < p.shape[-1]:
        raise ValueError(f"draft_tokens must be from 0 to {p.shape[-1] - 1}, got one outside")


def emit(draft_tokens: Tensor, accepted: Tensor, final: Tensor) -> Verified:
    """Put together what a step emits.

    Args:
        draft_tokens: [B, K] int64.
        accepted: [B, K] bool; all after the first False is rejected too.
        final: [B, K+1] int64, the target's own token for each place where the accepted ones might end.
    """
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
    places = torch.arange(final.shape[1], device=final.device)
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    ends = num_accepted[:, None]
    tokens = torch.where(places < ends, tokens, torch.where(places == ends, final, -1))
    return Verified(tokens=tokens, num_accepted=num_accepted)
