"""Speculative sampling of tokens that are vectors, such as those of autoregressive image models with a diffusion head.

A drafted x is kept with min(1, p(x) / q(x)), p and q being densities. Else x is drawn from max(p − q, 0), made to sum
to 1. Its integral is not known and need not be: draws from p of which each is kept with max(1 − q(x) / p(x), 0) follow
it. A rejection takes 1 / Z draws on average and happens with probability Z, the total variation of p and q, so that a
step takes one such draw on average, however alike the two are. So what is emitted follows p whatever the draft is.

What a diffusion head draws has no density that could be computed, but its trajectory has, a product of the denoising
steps'. There x is the whole trajectory, from the same noise on in both models, and its end is the token. The ratio is
that of trajectories, so fewer are kept than ends would be.

It is no rule of `models.verify`: those read probabilities of a vocabulary, which there is none of here.

Letters: B blocks, K drafted tokens a block, W width of what is drawn, n blocks that a law is asked about.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

PAPER = "arXiv:2411.11925"
MOST_TRIES = 10_000


class Law(Protocol):
    """What comes next in each of B blocks."""

    def log_density(self, blocks: Tensor, x: Tensor) -> Tensor:
        """[n] int64 numbers of blocks, [n, W] → [n]."""

    def draw(self, blocks: Tensor, rng: torch.Generator) -> Tensor:
        """[n] int64 numbers of blocks → [n, W]."""


class Emitted(NamedTuple):
    tokens: Tensor  # [B, K + 1, W] the accepted ones, one more from the target, then NaN
    num_accepted: Tensor  # [B] int64, from 0 to K
    num_tries: Tensor  # [B] int64, draws from the target that it took to find what a rejection leaves; 0 without one


def verify(
    drafted: Tensor, q: Sequence[Law], p: Sequence[Law], rng: torch.Generator, most_tries: int = MOST_TRIES
) -> Emitted:
    """Verify one drafted chain a block.

    Args:
        drafted: [B, K, W], each drawn from its q.
        q, p: K laws of the draft, and K + 1 of the target, each after the drafted tokens before it.
        rng: on the device of `drafted`.
        most_tries: draws after which the last one is emitted as it is, because rounding may leave next to nothing of
            p − q. What is emitted is off by at most 1 / (e · most_tries) in total variation.

    Raises:
        ValueError: the numbers of laws and tokens differ, or a drafted token has no density in q.
    """
    num_blocks, num_drafted, width = drafted.shape if drafted.ndim == 3 else (0, 0, 0)
    if drafted.ndim != 3 or (len(q), len(p)) != (num_drafted, num_drafted + 1):
        raise ValueError(
            f"wanted drafted [B, K, W], K laws q and K + 1 laws p; got {list(drafted.shape)}, {len(q)} and {len(p)}"
        )
    if most_tries < 1:
        raise ValueError(f"most_tries must be at least 1, got {most_tries}")
    device = drafted.device
    tokens = torch.full((num_blocks, num_drafted + 1, width), torch.nan, dtype=drafted.dtype, device=device)
    num_accepted, num_tries = torch.zeros(2, num_blocks, dtype=torch.int64, device=device)
    going = torch.arange(num_blocks, device=device)
    for place, (draft_law, target_law) in enumerate(zip(q, p, strict=False)):
        x = drafted[going, place]
        log_q = draft_law.log_density(going, x)
        if not log_q.isfinite().all():
            raise ValueError(f"q gives drafted token {place + 1} of a block no density; each must be drawn from its q")
        kept = _coins(log_q, rng).log() < target_law.log_density(going, x) - log_q
        tokens[going[kept], place] = x[kept]
        num_accepted[going[kept]] += 1
        rejected, going = going[~kept], going[kept]
        left = tokens.new_empty(len(rejected), width)
        num_tries[rejected] = _draw_left(left, target_law, draft_law, rejected, rng, most_tries)
        tokens[rejected, place] = left
    if len(going):
        tokens[going, num_drafted] = p[-1].draw(going, rng).to(tokens.dtype)
    return Emitted(tokens, num_accepted, num_tries)


def _draw_left(found: Tensor, p: Law, q: Law, blocks: Tensor, rng: torch.Generator, most_tries: int) -> Tensor:
    """Fill `found` [n, W] from max(p − q, 0) of some blocks [n]; returns [n] how many draws of p each took."""
    tries, missing = torch.zeros_like(blocks), torch.arange(len(blocks), device=blocks.device)
    for number in range(1, most_tries + 1):
        if not len(missing):
            break
        here = blocks[missing]
        x = p.draw(here, rng).to(found.dtype)
        ratio = (q.log_density(here, x) - p.log_density(here, x)).exp()
        found[missing], tries[missing] = x, number
        missing = missing[_coins(ratio, rng) >= 1 - ratio]
    return tries


def _coins(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=rng, device=like.device, dtype=torch.float64)
