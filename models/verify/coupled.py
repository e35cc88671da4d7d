"""Gumbel coupling: draft and target draw by the same noise, and a drafted token is kept where both draw it.

With g = −log E, E exponential, argmax (log q + g) is drawn from q and argmax (log p + g) from p. What is emitted is a
function of p and the noise alone, so no draft changes it. Both draw x with probability

    1 / Σᵥ max(p(v) / p(x), q(v) / q(x)),

in all at least (1 − TV) / (1 + TV), where speculative sampling keeps 1 − TV. This rule sees the drafted x and not the
noise; it emits y ≠ x by their joint law,

    q(x) p(y) ∫ du / D(u)² from p(x)/q(x) to p(y)/q(y), D(u) = Σᵥ max(u q(v), p(v)),

u being the draft's least E/q by the target's least E/p. A further sibling is coupled with the law that is left by those
before it. The serving engine has the noise itself: models/engines/vllm/patches/sampling.py.
"""

from typing import Literal

import torch
from torch import Tensor

from models.core.drafting.proposal import Choice, Siblings
from models.params import BaseParams
from models.verify import by_choice, common_prefix, expected_of_chain, normalised

PAPER = "arXiv:2408.07978, algorithm 1"
LOSSLESS = True
SAMPLES = True
BLOCKS = 8  # whose laws are sorted at a time, in float64
SIBLINGS: tuple[Siblings, ...] = ("independent", "without replacement", "certain", "certain but one")


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["coupled"] = "coupled"


def choose(p: Tensor, token_ids: Tensor, q: Tensor, params: Params) -> Choice:
    """Couple siblings in turn with what the ones before them left."""
    chances, reached = [], torch.ones_like(p[:, 0])
    for token, law in zip(token_ids.split(1, dim=1), q.unbind(1), strict=True):
        ratio, rates, integral = _races(p, law)
        emitted = (p * (integral - integral.gather(1, token)).clamp(min=0)).to(p)
        kept = (ratio / rates).gather(1, token).to(p)
        chances.append(reached * kept[:, 0])
        reached = reached * (1 - kept[:, 0])
        p = normalised(emitted.scatter(1, token, 0), p)
    return Choice(torch.stack(chances, dim=1), p)


verify = by_choice(choose)
count_accepted = common_prefix  # a rejected token is one that the target did not draw


def expected_accepted(token_ids: Tensor, q: Tensor, p: Tensor, params: Params) -> Tensor:
    """Return how many tokens of a chain are accepted on average, see `expected_of_chain`."""
    p, q = p.float(), q.float()
    few = zip(p.split(BLOCKS), q.split(BLOCKS), strict=True)
    return expected_of_chain(token_ids, p, torch.cat([both(*rows) for rows in few]))


def both(p: Tensor, q: Tensor) -> Tensor:
    """Return [..., V] the chance that draft and target draw a token, of their laws [..., V]."""
    drawn, kept = (q > 0).reshape(-1, q.shape[-1]).any(dim=0), torch.zeros_like(p)
    rates = _races(p[..., drawn], q[..., drawn], p[..., ~drawn].sum(dim=-1, keepdim=True))[1]
    kept[..., drawn] = torch.where(q[..., drawn] > 0, p[..., drawn] / rates, 0).to(kept)
    return kept


def _races(p: Tensor, q: Tensor, beside: Tensor | float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each token p/q, D there, and the integral from the least of them to there [..., V], float64.

    D is linear between two of them, so that the integral from a to b is (b - a) / (D(a) D(b)). `beside` is what p has
    of tokens that are not there, which q never draws.
    """
    p, q = p.double(), q.double()
    drawn = q > 0
    ratio = torch.where(drawn, p / q.where(drawn, 1), 0)
    ratio, order = ratio.sort(dim=-1)
    slower = beside + p.sum(dim=-1, keepdim=True) - p.where(drawn, 0).gather(-1, order).cumsum(dim=-1)
    rates = ratio * q.gather(-1, order).cumsum(dim=-1) + slower
    pieces = ratio.diff(dim=-1) / (rates[..., 1:] * rates[..., :-1])
    integral = torch.nn.functional.pad(pieces.cumsum(dim=-1), (1, 0))
    to_the_end = integral[..., -1:] + 1 / (q.sum(dim=-1, keepdim=True) * rates[..., -1:])
    ratio, rates, integral = (torch.empty_like(one).scatter(-1, order, one) for one in (ratio, rates, integral))
    return ratio, rates, torch.where(drawn, integral, to_the_end)
