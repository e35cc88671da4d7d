"""Greedy verification: keep drafted tokens while each is the target's most likely one, then emit the target's.

A tie goes to the lower token id, as in argmax. q and rng are not read: whatever the draft is, the output is the
target's greedy output.
"""

from typing import Literal

import torch
from torch import Tensor

from models.params import BaseParams
from models.verify import Verified, check_block, emit

PAPER = "arXiv:1811.03115, section 3"
LOSSLESS = True
SAMPLES = False


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["greedy"] = "greedy"


def verify(draft_tokens: Tensor, q: Tensor, p: Tensor, rng: torch.Generator, params: Params) -> Verified:
    """Verify one drafted block a row.

    Args:
        draft_tokens: [B, K] int64.
        q: [B, K, V].
        p: [B, K+1, V]; logits serve as well.
        rng: not read.
        params: nothing to set.

    Raises:
        ValueError: the shapes don't fit each other.
    """
    check_block(draft_tokens, q, p)
    best = p.argmax(dim=-1)
    return emit(draft_tokens, draft_tokens == best[:, :-1], best)
