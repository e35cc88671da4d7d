"""Verification rules: which drafted tokens the target keeps, and what it emits in their place.

Letters: B blocks, N drafted tokens a block (K in a chain), V vocabulary. p[:, 0] is the target's distribution after the
last certain token and p[:, i + 1] after node i, at the sampling settings that are served (temperature and cuts already
applied), so p of greedy decoding has a single 1 a row; q is the draft's, and stands in the `Proposal`. Each rule's
module has

- `LOSSLESS`: emitted tokens follow p whatever the draft is;
- `SAMPLES`: that holds for any p, not only for one with a single 1 a row;
- `verify(proposal, p, rng, params) -> Verified`: keep a path of the proposed trees and emit one token more;
- `expected_accepted(token_ids, q, p, params) -> [B]`: what it would have accepted on answers that are already there;
- `count_accepted(drafted, emitted) -> int`: what it did accept, from a chain's ids alone, which is all that a log has;
  ValueError in a rule that may emit a token that it rejected, so that ids don't tell.
"""

import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.params import BaseParams
from models.proposal import Proposal


class Rules(NamedTuple):
    """The rules that an engine verifies by."""

    greedy: BaseParams  # at temperature 0
    sampling: BaseParams  # above

    def at(self, temperature: float) -> BaseParams:
        """Return the rule of requests of a temperature."""
        return self.sampling if temperature > 0 else self.greedy


@dataclass(frozen=True, eq=False)
class Verified:
    """Outcome of one verification step.

    Attributes:
        path: [B, depth] int64, the accepted nodes from the root on, then -1.
        tokens: [B, depth + 1] int64, the accepted tokens, one more from the target, then -1.
        num_accepted: [B] int64, from 0 to the proposal's depth.
    """

    path: Tensor
    tokens: Tensor
    num_accepted: Tensor


def check_block(proposal: Proposal, p: Tensor) -> None:
    """Raise unless p fits a proposal.

    Raises:
        ValueError: a shape is wrong, or a token is not one of the vocabulary.
    """
    num_blocks, num_drafted = proposal.token_ids.shape
    if p.ndim != 3 or p.shape[:2] != (num_blocks, num_drafted + 1):
        raise ValueError(f"p must be [{num_blocks}, {num_drafted + 1}, V], got {list(p.shape)}")
    if proposal.q is not None and proposal.q.shape[-1] != p.shape[-1]:
        raise ValueError(f"q must be [{num_blocks}, {num_drafted}, {p.shape[-1]}], got {list(proposal.q.shape)}")
    tokens = proposal.token_ids
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < p.shape[-1]:
        raise ValueError(f"token_ids must be from 0 to {p.shape[-1] - 1}, got one outside")


def emit(proposal: Proposal, ends: Tensor, final: Tensor) -> Verified:
    """Put together what a step emits.

    Args:
        proposal: what was verified.
        ends: [B] int64, the row (`models.proposal`) at which each block's accepted path ends; 0 if nothing is accepted.
        final: [B] int64, the target's own token after it.
    """
    depth = proposal.depth
    padded = [[*path, *[-1] * (depth - len(path))] for path in proposal.paths]
    path = torch.tensor(padded, dtype=torch.int64, device=ends.device).view(len(padded), depth)[ends]
    num_accepted = (path >= 0).sum(dim=1)
    drafted = torch.nn.functional.pad(proposal.token_ids, (0, 1), value=-1)  # node -1 is the padding
    tokens = torch.nn.functional.pad(drafted.gather(1, path % drafted.shape[1]), (0, 1), value=-1)
    return Verified(path, tokens.scatter(1, num_accepted[:, None], final[:, None]), num_accepted)


def common_prefix(drafted: Sequence[int], emitted: Sequence[int]) -> int:
    """Count the tokens that two lists share from the left."""
    return len(os.path.commonprefix([list(drafted), list(emitted)]))
