"""Several drafted tokens for one place: how siblings of a tree are drawn, how often one of them could be kept, and how
often a rule keeps one.

Whatever the rule, all it emits must follow p, so that kept tokens are a transport of mass from sets of siblings to
tokens of p. Its dual gives the most that any rule can keep, without solving the transport:

    1 + min over sets H of tokens of ( p(H) − Pr[all siblings are in H] )

and only the sets that hold the tokens of greatest q/p count, so one pass over the sorted vocabulary finds the minimum.

Letters: B places, k siblings of a place, V vocabulary, M outcomes of drawing siblings.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from models.core.drafting.proposal import Choose, Siblings

PAPER = "arXiv:2502.18779"

LARGEST_ENUMERATION = 1_000_000
STEP = 0.5  # in log t of the integral of `_all_inside`: found to 1e-7


class Drawn(NamedTuple):
    """Siblings, and what each was drawn from."""

    token_ids: Tensor  # [B, k]
    q: Tensor  # [B, k, V]


class Outcome(NamedTuple):
    """What comes of a place, over all siblings that may be drawn there."""

    kept: Tensor  # the chance that one of them is kept
    emitted: Tensor  # [V] the law of the token that is emitted

    def lost(self, p: Tensor) -> Tensor:
        """Return the total variation between what is emitted and p [V]: 0 in a lossless rule."""
        return (self.emitted - p).abs().sum() / 2


def draw(q: Tensor, num_siblings: int, siblings: Siblings, rng: torch.Generator) -> Drawn:
    """Draw the k siblings of B places by q [B, V]; without replacement by Gumbel-top-k, arXiv:2402.14160.

    Raises:
        ValueError: k is no number of siblings, or more than the tokens that have probability.
    """
    _check(q, num_siblings, siblings)
    if siblings == "without replacement":
        uniform = torch.rand(q.shape, generator=rng, device=q.device, dtype=torch.float64)
        gumbel = -(-uniform.clamp(min=torch.finfo(torch.float64).tiny).log()).log()
        tokens = (q.double().log() + gumbel).topk(num_siblings).indices
        laws = [_law(q, tokens[:, :number], num_siblings, siblings) for number in range(num_siblings)]
        return Drawn(tokens, torch.stack(laws, dim=1))
    tokens, laws = q.new_empty(len(q), 0, dtype=torch.int64), []
    for _ in range(num_siblings):
        laws.append(_law(q, tokens, num_siblings, siblings))
        tokens = torch.cat([tokens, torch.multinomial(laws[-1], 1, generator=rng)], dim=1)
    return Drawn(tokens, torch.stack(laws, dim=1))


def most_kept(p: Tensor, q: Tensor, num_siblings: int, siblings: Siblings) -> Tensor:
    """Return [B] float64 the greatest chance with which a lossless rule can keep one of k siblings, of p and q [B, V].

    Raises:
        ValueError: p and q have different shapes, or as in `draw`.
    """
    if p.shape != q.shape:
        raise ValueError(f"p and q must have one shape, got {list(p.shape)} and {list(q.shape)}")
    _check(q, num_siblings, siblings)
    p, q = p.double(), q.double()
    if siblings in ("certain", "certain but one"):
        random = siblings == "certain but one"
        certain = torch.zeros_like(p, dtype=torch.bool)
        certain.scatter_(1, _likeliest_first(q)[:, : num_siblings - random], True)
        rest = q.masked_fill(certain, 0)
        rest = rest / rest.sum(dim=-1, keepdim=True)
        return torch.where(certain, p, torch.minimum(p, rest) if random else 0).sum(dim=-1)
    order = torch.where(p > 0, q / p, math.inf).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    if siblings == "independent":
        all_inside = q.cumsum(dim=-1) ** num_siblings
    else:
        all_inside = torch.stack([_all_inside(one, num_siblings) for one in q])
    return (1 + (p.cumsum(dim=-1) - all_inside).min(dim=-1).values).clamp(0, 1)


def exact_outcome(choose: Choose, p: Tensor, q: Tensor, num_siblings: int, siblings: Siblings) -> Outcome:
    """Return what a rule makes of a place with p and q [V], few of q above 0, as a sum over all siblings that may come.

    Raises:
        ValueError: of so many tokens there are more than a million outcomes, or as in `draw`.
    """
    _check(q[None], num_siblings, siblings)
    drafted = q.nonzero()[:, 0]
    if len(drafted) ** num_siblings > LARGEST_ENUMERATION:
        raise ValueError(f"{len(drafted)}^{num_siblings} outcomes are too many to sum over; cut q to fewer tokens")
    tokens = torch.cartesian_prod(*[drafted] * num_siblings).view(-1, num_siblings)
    chance, laws = torch.ones(len(tokens), dtype=q.dtype), torch.empty(len(tokens), 0, len(q), dtype=q.dtype)
    for number in range(num_siblings):
        # Of what can't be drawn nothing is asked: its law may not exist.
        tokens, chance, laws = (part[chance > 0] for part in (tokens, chance, laws))
        law = _law(q.expand(len(tokens), -1), tokens[:, :number], num_siblings, siblings)
        chance = chance * law.gather(1, tokens[:, number, None])[:, 0]
        laws = torch.cat([laws, law[:, None]], dim=1)
    tokens, chance, laws = (part[chance > 0] for part in (tokens, chance, laws))
    choice = choose(p.expand(len(tokens), -1), tokens, laws)
    kept = choice.chances.sum(dim=-1)
    emitted = ((1 - kept) * chance) @ choice.rest
    emitted = emitted.scatter_add(0, tokens.flatten(), (choice.chances * chance[:, None]).flatten())
    return Outcome((kept * chance).sum(), emitted)


def _check(q: Tensor, num_siblings: int, siblings: Siblings) -> None:
    if num_siblings < 1:
        raise ValueError(f"num_siblings must be at least 1, got {num_siblings}")
    fewest = int((q > 0).sum(dim=-1).min())
    if siblings != "independent" and num_siblings > fewest:
        raise ValueError(f"{num_siblings} different siblings can't be drawn from {fewest} tokens with probability in q")


def _law(q: Tensor, drawn: Tensor, num_siblings: int, siblings: Siblings) -> Tensor:
    """Return what the next sibling is drawn from, of q [M, V] after the siblings [M, j] before it."""
    if siblings == "independent":
        return q
    if siblings == "certain" or (siblings == "certain but one" and drawn.shape[1] < num_siblings - 1):
        return one_hot(_likeliest_first(q)[:, drawn.shape[1]], q.shape[-1]).to(q)
    left = q.scatter(1, drawn, 0.0)
    return left / left.sum(dim=-1, keepdim=True)


def _likeliest_first(q: Tensor) -> Tensor:
    """[M, V] → [M, V] token ids; of equally likely ones the lower first."""
    return q.argsort(dim=-1, descending=True, stable=True)


def _all_inside(q: Tensor, num_siblings: int) -> Tensor:
    """Return [V] the chance that k tokens drawn without replacement are all in each beginning H of a vocabulary.

    `q` [V] is float64, in order.
    Drawing is a race in which token i arrives after a time Exp(qᵢ). All of the first k are in H unless a token outside
    comes when fewer than k of H have: Pr = 1 − q(not H) ∫ e^−t Σⱼ‹ₖ eⱼ(exp(qᵢt) − 1, i in H) dt, with eⱼ the elementary
    symmetric polynomials. They are sums of sums from the left, in logarithms, because they grow beyond any number; the
    integral over log t is a sum at equal steps.
    """
    # e₀ and e₁ have integrals that are known.
    total = 1 + (q / (1 - q)).cumsum(dim=-1) if num_siblings > 1 else torch.ones_like(q)
    if num_siblings > 2:
        log_t = torch.arange(-8, 30, STEP, dtype=q.dtype, device=q.device)[:, None]
        times = q * log_t.exp()
        log_odds = times + (-torch.expm1(-times)).log()
        log_polynomial = log_odds.logcumsumexp(dim=-1)
    for _ in range(2, num_siblings):
        before = torch.nn.functional.pad(log_polynomial[:, :-1], (1, 0), value=-math.inf)
        log_polynomial = (log_odds + before).logcumsumexp(dim=-1)
        total = total + STEP * (log_polynomial - log_t.exp() + log_t).exp().sum(dim=0)
    outside = (1 - q.cumsum(dim=-1)).clamp(min=0)
    # Where nothing is outside, a token of all of q makes the integral endless.
    return torch.where(outside > 0, 1 - outside * total, 1.0).clamp(0, 1)
