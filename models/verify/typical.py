"""Medusa's typical acceptance: keep a drafted x that the target finds likely enough, p(x) > min(ε, δ exp(−H(p))).

H is the entropy of p, in nats, so that the bar is lower where many tokens would do. Of a tree's paths the longest that
passes is kept, of equally long ones the likeliest. q is not read. One more token is drawn from p; the paper takes the
likeliest one instead, and so does not sample even where nothing is drafted.

Not lossless. A token over the bar comes as often as it is drafted and not as often as the target says it; one under it
comes only where it is drawn in the end. With one drafted token the total variation between the emitted token and p is
½ Σ |kept + (1 − Σ kept) p − p| with kept = q where p is over the bar, else 0
(`models.core.drafting.multi_draft.exact_outcome`).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from models.core.drafting.proposal import Choice, Proposal, Siblings
from models.params import BaseParams
from models.verify import Verified, check_block, emit, expected_of_chain

PAPER = "arXiv:2401.10774, typical acceptance"
LOSSLESS = False
SAMPLES = True
SIBLINGS: tuple[Siblings, ...] = ("certain", "certain but one", "independent", "without replacement")


class Params(BaseParams):
    """How likely is likely enough.

    Attributes:
        epsilon: ε, what is always enough.
        delta: δ, what is enough as a share of exp(−H), which each of n equally likely tokens has as its probability.
    """

    name: Literal["typical"] = "typical"
    epsilon: float = Field(0.09, gt=0, le=1)
    delta: float = Field(0.3, gt=0, le=1)


def verify(proposal: Proposal, p: Tensor, rng: torch.Generator, params: Params) -> Verified:
    """Verify one drafted tree a block; see `models.verify`."""
    check_block(proposal, p)
    p = p.float()
    passes = _passes(p, params)
    num_kept = torch.zeros(p.shape[:2], dtype=torch.int64, device=p.device)  # of the path to each row, −1 if it is cut
    likelihood = torch.zeros(p.shape[:2], device=p.device)
    for node, parent in enumerate(proposal.parents):
        token = proposal.token_ids[:, node, None]
        passed = (num_kept[:, parent + 1] >= 0) & passes[:, parent + 1].gather(1, token)[:, 0]
        num_kept[:, node + 1] = torch.where(passed, num_kept[:, parent + 1] + 1, -1)
        likelihood[:, node + 1] = likelihood[:, parent + 1] + p[:, parent + 1].gather(1, token)[:, 0].log()
    longest = num_kept == num_kept.max(dim=1, keepdim=True).values
    ends = likelihood.masked_fill(~longest, float("-inf")).argmax(dim=1)
    after = p[torch.arange(len(p), device=p.device), ends]
    return emit(proposal, ends, torch.multinomial(after, 1, generator=rng)[:, 0])


def choose(p: Tensor, token_ids: Tensor, q: Tensor, params: Params) -> Choice:
    """Keep the likeliest child that passes, of equal ones the first."""
    likely = torch.where(_passes(p, params), p, 0.0).gather(1, token_ids)
    best = torch.nn.functional.one_hot(likely.argmax(dim=1), token_ids.shape[1])
    return Choice((best * (likely > 0)).to(p), p)


def expected_accepted(token_ids: Tensor, q: Tensor, p: Tensor, params: Params) -> Tensor:
    """Return what is expected of a chain; see `models.verify`."""
    return expected_of_chain(token_ids, p.float(), torch.where(_passes(p.float(), params), q.float(), 0.0))


def count_accepted(drafted: Sequence[int], emitted: Sequence[int]) -> int:
    """Raise ValueError: a token under the bar may be drawn from p in its own place, so that ids don't tell."""
    raise ValueError("rule typical may emit a token that it rejected; what was accepted can't be told from ids")


def _passes(p: Tensor, params: Params) -> Tensor:
    """[…, V] bool: which tokens are over the bar."""
    entropy = -torch.special.xlogy(p, p).sum(dim=-1, keepdim=True)
    bar: Tensor = (params.delta * (-entropy).exp()).clamp(max=params.epsilon)
    return p > bar
