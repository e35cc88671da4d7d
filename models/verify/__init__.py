"""Verification rules: which drafted tokens the target keeps, and what it emits in their place.

Letters: B blocks, N drafted tokens a block (K in a chain), V vocabulary. p[:, 0] is the target's distribution after the
last certain token and p[:, i + 1] after node i, at the sampling settings that are served (temperature and cuts already
applied), so p of greedy decoding has a single 1 a row; q is the draft's, and stands in the `Proposal`. Each rule's
module has

- `LOSSLESS`: emitted tokens follow p whatever the draft is;
- `SAMPLES`: it takes any p, not only one with a single 1 a row;
- `SIBLINGS`: how children of one node may have been drawn (`models.core.drafting.proposal`), first the way that it is
  made for; others are a ValueError where losslessness hangs on it. An only child may have been drawn in any way;
- `verify(proposal, p, rng, params) -> Verified`: keep a path of the proposed trees and emit one token more. Proposals
  are [B, N], p is [B, N+1, V]; ValueError where they don't fit. A rule that does not sample takes logits for p as well;
- `READS_STATES`: only in rules whose `verify` takes `states` besides, [B, N+1, H] what the output matrix multiplied;
- `READS_TEXT`: only in rules whose `verify` takes `text` besides, of each block all tokens that are certain;
- `choose(p, token_ids, q, params) -> Choice`: in a rule that `SAMPLES`, what it does with the children of one node in
  n blocks: p [n, V], the children's ids [n, k], and q [n, k, V] what each was drawn from, given the ones before it;
- `expected_accepted(token_ids, q, p, params) -> [B]`: what it would have accepted on average from each start of answers
  that are already there: ids [B, K] of what the target said after it, q [B, K, V], a row of zeros where nothing is
  drafted, and p [B, K, V]. The mean over answers is exact, a single one may be above K. ValueError in a rule that may
  keep tokens that the target never says, so that its answers don't tell;
- `count_accepted(drafted, emitted) -> int`: what it did accept, from a chain's ids alone, which is all that a log has;
  ValueError in a rule that may emit a token that it rejected, so that ids don't tell.

SpecInfer's rules for trees (arXiv:2305.09781) are `greedy` and `rejection`, given a proposal with branches.
"""

import os.path
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.core.drafting.proposal import Choice, Choose, Proposal
from models.params import BaseParams


@dataclass(frozen=True, eq=False)
class Verified:
    """Outcome of one verification step."""

    path: Tensor  # [B, depth] int64, the accepted nodes from the root on, then -1
    tokens: Tensor  # [B, depth + 1] int64, the accepted tokens, one more from the target, then -1
    num_accepted: Tensor  # [B] int64, from 0 to the proposal's depth


Verify = Callable[[Proposal, Tensor, torch.Generator, Any], Verified]
# p [n, V], a drafted token [n, 1], q [n, V] it was drawn from → (relaxed, whole) [n, V] each, see `reject_in_turn`.
See = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def check_block(proposal: Proposal, p: Tensor) -> None:
    """Raise ValueError if p does not fit a proposal: a shape is wrong, or a token is not one of the vocabulary."""
    num_blocks, num_drafted = proposal.token_ids.shape
    if p.ndim != 3 or p.shape[:2] != (num_blocks, num_drafted + 1):
        raise ValueError(f"p must be [{num_blocks}, {num_drafted + 1}, V], got {list(p.shape)}")
    if proposal.q is not None and proposal.q.shape[-1] != p.shape[-1]:
        raise ValueError(f"q must be [{num_blocks}, {num_drafted}, {p.shape[-1]}], got {list(proposal.q.shape)}")
    tokens = proposal.token_ids
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < p.shape[-1]:
        raise ValueError(f"token_ids must be from 0 to {p.shape[-1] - 1}, got one outside")


def emit(proposal: Proposal, ends: Tensor, final: Tensor) -> Verified:
    """Put together what a step emits. `ends` [B] int64 is the row (`models.core.drafting.proposal`) at which each
    block's accepted path ends, 0 if nothing is accepted, and `final` [B] int64 the target's own token after it."""
    depth = proposal.depth
    padded = [[*path, *[-1] * (depth - len(path))] for path in proposal.paths]
    path = torch.tensor(padded, dtype=torch.int64, device=ends.device).view(len(padded), depth)[ends]
    num_accepted = (path >= 0).sum(dim=1)
    drafted = torch.nn.functional.pad(proposal.token_ids, (0, 1), value=-1)  # node -1 is the padding
    tokens = torch.nn.functional.pad(drafted.gather(1, path % drafted.shape[1]), (0, 1), value=-1)
    return Verified(path, tokens.scatter(1, num_accepted[:, None], final[:, None]), num_accepted)


def follow(proposal: Proposal, said: Tensor) -> Verified:
    """Keep drafted tokens while each is what is said [B, N+1] there, of equal siblings the first; then emit that."""
    right = proposal.token_ids == said[:, [parent + 1 for parent in proposal.parents]]
    ends = torch.zeros(len(said), dtype=torch.int64, device=said.device)
    for node, parent in enumerate(proposal.parents):
        ends = torch.where((ends == parent + 1) & right[:, node], node + 1, ends)
    return emit(proposal, ends, said.gather(1, ends[:, None])[:, 0])


def children(proposal: Proposal) -> list[tuple[int, list[int]]]:
    """Return each row that something follows, in order, with the nodes that follow it."""
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(proposal.parents):
        found.setdefault(parent + 1, []).append(node)
    return sorted(found.items())


def walk(proposal: Proposal, p: Tensor, rng: torch.Generator, choose: Choose) -> Verified:
    """Go from the root to a kept child, and on, until none is kept; emit one token of what is left there.

    `choose` is asked once for each node with children, of the blocks that got there. With q of other settings the
    output is not p's. ValueError if p doesn't fit the proposal, or a drafted token has no probability in q.
    """
    check_block(proposal, p)
    p, q = p.float(), proposal.distributions(p.shape[-1]).float()
    if (q.gather(-1, proposal.token_ids[..., None]) <= 0).any():
        raise ValueError("q gives a drafted token no probability; each token must be drawn from its q")
    coins = torch.rand(len(p), proposal.num_tokens + 1, generator=rng, device=p.device)
    ends = torch.zeros(len(p), dtype=torch.int64, device=p.device)
    left = p[:, 0].clone()  # the law of the token after each block's path
    for row, nodes in children(proposal):
        here = (ends == row).nonzero()[:, 0]
        if len(here) == 0:
            continue
        of_nodes = here[:, None], torch.tensor(nodes, device=p.device)
        choice = choose(p[here, row], proposal.token_ids[of_nodes], q[of_nodes])
        kept = (coins[here, row, None] >= choice.chances.cumsum(dim=-1)).sum(dim=-1)  # as many as there are: none
        ends[here] = torch.tensor([*(node + 1 for node in nodes), row], device=p.device)[kept]
        left[here] = torch.where((kept == len(nodes))[:, None], choice.rest, p[here, ends[here]])
    return emit(proposal, ends, torch.multinomial(left, 1, generator=rng)[:, 0])


def by_choice(choose: Callable[[Tensor, Tensor, Tensor, Any], Choice]) -> Verify:
    """Return the `verify` of a rule that keeps what its `choose` says, node by node; see `walk`."""

    def verify(proposal: Proposal, p: Tensor, rng: torch.Generator, params: BaseParams) -> Verified:
        """Verify one drafted tree a block; see `models.verify.walk`, and `choose` for what else is a ValueError."""
        return walk(proposal, p, rng, lambda p, token_ids, q: choose(p, token_ids, q, params))

    return verify


def reject_in_turn(p: Tensor, token_ids: Tensor, q: Tensor, see: See | None = None) -> Choice:
    """Try siblings in turn: keep x with min(1, p(x) / q(x)), else go on with what it leaves of p, max(p − q, 0).

    In rules that are not lossless `see` says what stands for p where x is verified: x is kept with
    min(1, relaxed(x) / q(x)), and leaves max(whole − min(q, relaxed), 0).
    """
    chances, reached = [], torch.ones_like(p[:, 0])
    for token, law in zip(token_ids.split(1, dim=1), q.unbind(1), strict=True):
        relaxed, whole = (p, p) if see is None else see(p, token, law)
        taken = torch.minimum(relaxed, law)
        kept = (taken.gather(1, token) / law.gather(1, token))[:, 0]
        chances.append(reached * kept)
        reached = reached * (1 - kept)
        p = normalised((whole - taken).clamp(min=0), whole)
    return Choice(torch.stack(chances, dim=1), p)


def normalised(law: Tensor, otherwise: Tensor) -> Tensor:
    """Return rows that sum to 1; empty ones, which are never asked for but for rounding, are `otherwise`."""
    total = law.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, law / total, otherwise)


def expected_of_chain(token_ids: Tensor, p: Tensor, kept: Tensor) -> Tensor:
    """Return how many tokens of a chain are accepted on average from each start of an answer that was drawn from p.

    Σᵢ ∏ⱼ‹ᵢ kept(xⱼ)/p(xⱼ) · Σᵥ keptᵢ(v), x being the answer: a step that goes on past x was drafted x and kept it,
    where the answer has it with p(x). `kept` [B, K, V] is the chance that a token is drafted and kept, 0 where p is.
    """
    said, chance = (law.gather(-1, token_ids[..., None])[..., 0] for law in (kept, p))
    goes_on = (said / chance.clamp(min=torch.finfo(chance.dtype).tiny)).cumprod(dim=-1)
    reached = torch.nn.functional.pad(goes_on[:, :-1], (1, 0), value=1.0)
    return (reached * kept.sum(dim=-1)).sum(dim=-1)


def expected_of_rejection(token_ids: Tensor, q: Tensor, p: Tensor, params: BaseParams) -> Tensor:
    """Return how many tokens of a chain speculative sampling accepts on average, see `expected_of_chain`."""
    return expected_of_chain(token_ids, p.float(), torch.minimum(p.float(), q.float()))


def expected_of_greedy(token_ids: Tensor, q: Tensor, p: Tensor, params: BaseParams) -> Tensor:
    """Return how many tokens of a chain are accepted from each start of a greedy answer: those that q drafts right."""
    return q.gather(-1, token_ids[..., None])[..., 0].float().cumprod(dim=-1).sum(dim=-1)


def common_prefix(drafted: Sequence[int], emitted: Sequence[int]) -> int:
    """Count the tokens that two lists share from the left."""
    return len(os.path.commonprefix([list(drafted), list(emitted)]))
