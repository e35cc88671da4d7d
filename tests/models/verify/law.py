"""Blocks with a known law: targets and drafts as tables, trees drawn from them, and a χ² test of what comes out.

A block's tokens are completed to one more than the tree is deep by drawing the missing ones from the target, so each
block is one draw from the joint distribution over all such outcomes, which is known exactly. A χ² test compares 200,000
of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from scipy.stats import chisquare
from torch import Tensor

from models.core.drafting.proposal import Proposal, Siblings
from models.core.drafting.sampling import probabilities
from models.engines import Sampling
from models.verify import Verified

NUM_BLOCKS = 200_000
P_VALUE = 1e-4


@dataclass(frozen=True, eq=False)
class Case:
    """A target and a draft as tables: the i-th, [V^i, V], holds the next token's law after a prefix of i tokens.

    Attributes:
        parents: the tree; None is a chain as long as q.
        siblings: how children of one node are drawn, see `models.core.drafting.multi_draft`.
    """

    p: list[Tensor]
    q: list[Tensor]
    parents: tuple[int, ...] | None = None
    siblings: Siblings = "independent"

    @property
    def size(self) -> int:
        return self.p[0].shape[-1]

    @property
    def tree(self) -> tuple[int, ...]:
        return tuple(range(-1, len(self.q) - 1)) if self.parents is None else self.parents

    def taken_by(self, rule) -> bool:
        """Whether a rule is made for what this case draws."""
        return len(set(self.tree)) == len(self.tree) or self.siblings in rule.SIBLINGS


def random_tables(depth: int, size: int, seed: int) -> list[Tensor]:
    """Distributions that differ from prefix to prefix, none below 0.03."""
    rng = torch.Generator().manual_seed(seed)
    weights = [torch.rand(size**i, size, generator=rng, dtype=torch.float64) ** 3 for i in range(depth)]
    return [0.03 + (1 - 0.03 * size) * weight / weight.sum(dim=-1, keepdim=True) for weight in weights]


def one_hot(tables: list[Tensor]) -> list[Tensor]:
    return [torch.nn.functional.one_hot(table.argmax(dim=-1), table.shape[-1]).double() for table in tables]


def halves(tables: list[Tensor], kept: int) -> list[Tensor]:
    """Probability on every other token only: even ones for `kept` 0, odd ones for 1."""
    masked = [table * (torch.arange(table.shape[-1]) % 2 == kept) for table in tables]
    return [table / table.sum(dim=-1, keepdim=True) for table in masked]


def warped(tables: list[Tensor], sampling: Sampling) -> list[Tensor]:
    return [probabilities(table.log(), sampling) for table in tables]


P3, Q2 = random_tables(3, 5, seed=1), random_tables(2, 5, seed=2)
P4, Q3 = random_tables(4, 4, seed=3), random_tables(3, 4, seed=4)
CUT = Sampling(temperature=0.7, top_p=0.8)
SAMPLED_CASES = {
    "K=2 V=5": Case(P3, Q2),
    "K=3 V=4": Case(P4, Q3),
    "no draft": Case(P4[:1], []),
    "draft is certain": Case(P3, one_hot(Q2)),
    "draft never right": Case(halves(P3, 0), halves(Q2, 1)),
}
BRANCHES = (-1, -1, 0, 0, 1, 1)
UNEVEN = (-1, 0, -1, -1, 2, 4)
TREE_CASES = {
    "branches": Case(P3, Q2, BRANCHES),
    "uneven branches": Case(P4, Q3, UNEVEN),
    "branches without replacement": Case(P3, Q2, BRANCHES, "without replacement"),
    "certain branches": Case(P3, Q2, BRANCHES, "certain"),
    "branches certain but one": Case(P3, Q2, BRANCHES, "certain but one"),
    "branches that are never right": Case(halves(P3, 0), halves(Q2, 1), BRANCHES),
}
GREEDY_TREE_CASES = {
    "branches": Case(one_hot(P3), Q2, BRANCHES),
    "uneven branches": Case(one_hot(P4), Q3, UNEVEN),
    "certain branches": Case(one_hot(P3), Q2, BRANCHES, "certain"),
}
GREEDY_CASES = {
    "K=2": Case(one_hot(P3), Q2),
    "K=3": Case(one_hot(P4), Q3),
    "draft is the target": Case(one_hot(P4), one_hot(P4)[:3]),
    "no draft": Case(one_hot(P4)[:1], []),
}


def draw(distributions: Tensor, rng: torch.Generator) -> Tensor:
    return torch.multinomial(distributions, 1, generator=rng)[:, 0]


@lru_cache(maxsize=2)
def propose(case: Case, seed: int) -> tuple[Proposal, Tensor]:
    """Draw a tree for each of NUM_BLOCKS; return it with the target's p [B, N+1, V]."""
    rng = torch.Generator().manual_seed(seed)
    prefixes, depths = [torch.zeros(NUM_BLOCKS, dtype=torch.int64)], [0]
    left: dict[int, Tensor] = {}  # of q after a node, when its first children are drawn
    tokens, drawn_from = [], []
    for node, parent in enumerate(case.tree):
        prefix, depth = prefixes[parent + 1], depths[parent + 1]
        q = left.get(parent, case.q[depth][prefix])
        if case.siblings == "certain" or (case.siblings == "certain but one" and parent in case.tree[node + 1 :]):
            q = torch.nn.functional.one_hot(q.argmax(dim=-1), case.size).double()
        tokens.append(draw(q, rng))
        drawn_from.append(q)
        if case.siblings != "independent":
            of_parent = left.get(parent, case.q[depth][prefix])
            rest = of_parent.scatter(1, tokens[-1][:, None], 0.0)
            left[parent] = rest / rest.sum(dim=-1, keepdim=True)
        prefixes.append(prefix * case.size + tokens[-1])
        depths.append(depth + 1)
    token_ids = torch.stack(tokens, dim=1) if tokens else torch.empty(NUM_BLOCKS, 0, dtype=torch.int64)
    q = None if case.siblings == "certain" or not tokens else torch.stack(drawn_from, dim=1)
    p = [case.p[depth][prefix] for prefix, depth in zip(prefixes, depths, strict=True)]
    return Proposal(token_ids, case.tree, q), torch.stack(p, dim=1)


def first_blocks(case: Case, seed: int, count: int) -> tuple[Proposal, Tensor]:
    """Return the first of `propose`."""
    proposal, p = propose(case, seed)
    q = None if proposal.q is None else proposal.q[:count]
    return Proposal(proposal.token_ids[:count], proposal.parents, q), p[:count]


def emitted_counts(
    verify: Callable[..., Verified], params: object, case: Case, seed: int, num_blocks: int = NUM_BLOCKS
) -> Tensor:
    """Return [V^(depth+1)], how often each completed block came out of so many."""
    proposal, p = first_blocks(case, seed, num_blocks)
    rng = torch.Generator().manual_seed(seed + 1)
    verified = verify(proposal, p, rng, params)
    check_form(verified, proposal)
    block = torch.zeros(num_blocks, dtype=torch.int64)
    for place, p_table in enumerate(case.p):
        token = verified.tokens[:, place]
        block = block * case.size + torch.where(token < 0, draw(p_table[block], rng), token)
    return torch.bincount(block, minlength=case.size ** len(case.p))


def check_form(verified: Verified, proposal: Proposal) -> None:
    """The path goes from the root down, its tokens are emitted, one more follows, then -1."""
    depth, ends = proposal.depth, verified.num_accepted[:, None]
    assert verified.path.dtype == verified.tokens.dtype == verified.num_accepted.dtype == torch.int64
    assert (verified.path.shape[1], verified.tokens.shape[1]) == (depth, depth + 1)
    assert torch.equal(verified.path >= 0, torch.arange(depth) < ends)
    assert torch.equal(verified.tokens >= 0, torch.arange(depth + 1) <= ends)
    parents = torch.tensor([*proposal.parents, -1])[verified.path]  # node -1 is the last one's parent in this list
    above = torch.nn.functional.pad(verified.path, (1, 0), value=-1)[:, :-1]
    kept = verified.path >= 0
    assert torch.equal(parents[kept], above[kept])
    drafted = proposal.token_ids.gather(1, verified.path.clamp(min=0)) if depth else proposal.token_ids
    assert torch.equal(verified.tokens[:, :-1][kept], drafted[kept])


def law_p_value(
    verify: Callable[..., Verified], params: object, case: Case, seed: int = 0, num_blocks: int = NUM_BLOCKS
) -> float:
    """Return the χ² p-value of the emitted blocks against target-only sampling; 0 when an impossible block came out."""
    joint = case.p[0].flatten()
    for table in case.p[1:]:
        joint = (joint[:, None] * table).flatten()
    counts, possible = emitted_counts(verify, params, case, seed, num_blocks), joint > 0
    if counts[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    return float(chisquare(counts[possible].double(), num_blocks * joint[possible] / joint.sum()).pvalue)
