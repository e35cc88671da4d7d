"""LANTERN: a drafted token is verified by the probability of all tokens that stand for much the same, as in images.

A(x) are the tokens nearest to x, added from the nearest on for as long as their probabilities sum to at most δ. The
target's law as x sees it, pˣ, has all of p(A(x)) at x and none at the others of A(x); its total variation to p is at
most δ. x is kept with min(1, pˣ(x) / q(x)), else max(pˣ − q, 0), made to sum to 1, is what is left for the next child,
or for the token that is emitted.

Not lossless. The bound δ holds for each pˣ, not for the emitted token, because every x claims its neighbours for
itself: up to the total variation of q and p can be lost. `models.core.drafting.multi_draft.exact_outcome` tells how
much is.

Without a table of neighbours no token has any, and the rule is `rejection`.
"""

from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.core.drafting.proposal import Choice, Siblings
from models.params import BaseParams
from models.verify import by_choice, common_prefix, expected_of_rejection, reject_in_turn

PAPER = "arXiv:2410.03355"
LOSSLESS = False
SAMPLES = True
SIBLINGS: tuple[Siblings, ...] = ("independent", "without replacement", "certain", "certain but one")


class Params(BaseParams):
    """Which tokens are alike, and how far that is trusted."""

    name: Literal["relaxed_nearest"] = "relaxed_nearest"
    neighbours: Path | None = Field(None, description="a file of `write_neighbours`; None for no neighbours.")
    delta: float = Field(0.1, ge=0, le=1, description="δ, the most probability that neighbours may lend to a token.")


def choose(p: Tensor, token_ids: Tensor, q: Tensor, params: Params) -> Choice:
    """Try the children of a node in turn; see `models.verify`. ValueError if the table of neighbours is missing, or of
    another vocabulary than p."""
    table = _read_neighbours(params.neighbours, p)

    def see(p: Tensor, token: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        seen = _as_seen_by(token, p, table, params.delta)
        return seen, seen

    return reject_in_turn(p, token_ids, q, see)


verify = by_choice(choose)


def expected_accepted(token_ids: Tensor, q: Tensor, p: Tensor, params: Params) -> Tensor:
    """Return what `rejection` expects of a chain; ValueError if tokens have neighbours."""
    if params.neighbours is not None:
        raise ValueError("rule relaxed_nearest keeps tokens for their neighbours; the target's answers don't tell")
    return expected_of_rejection(token_ids, q, p, params)


count_accepted = common_prefix  # a rejected x is never emitted in its place, max(pˣ − q, 0) being 0 there


def write_neighbours(embedding: Tensor, num_neighbours: int, file: Path) -> None:
    """Write for `Params.neighbours` the nearest tokens of each in [V, H], itself not counted, by Euclidean distance;
    ValueError if there are not as many other tokens."""
    if not 0 < num_neighbours < len(embedding):
        raise ValueError(f"num_neighbours must be from 1 to {len(embedding) - 1}, got {num_neighbours}")
    distances = torch.cdist(embedding.float(), embedding.float()).fill_diagonal_(float("inf"))
    save_file({"neighbours": distances.topk(num_neighbours, largest=False).indices}, file)


def _read_neighbours(file: Path | None, p: Tensor) -> Tensor:
    """Return [V, m] int64, the nearest first; m is 0 without a file."""
    if file is None:
        return torch.empty(p.shape[-1], 0, dtype=torch.int64, device=p.device)
    if not file.is_file():
        raise ValueError(f"rule relaxed_nearest: there is no file {file}; write one with write_neighbours")
    table = _load(file, file.stat().st_mtime_ns).to(p.device)
    if len(table) != p.shape[-1]:
        raise ValueError(f"{file} has neighbours of {len(table)} tokens, the target has {p.shape[-1]}")
    return table


@lru_cache(maxsize=1)
def _load(file: Path, written_ns: int) -> Tensor:
    return load_file(file)["neighbours"]


def _as_seen_by(token: Tensor, p: Tensor, table: Tensor, delta: float) -> Tensor:
    """Move in p [n, V] the probability of a token's [n, 1] neighbours, of a table [V, m], to it, up to δ."""
    near = table[token[:, 0]]
    lent = p.gather(1, near)
    lent = torch.where(lent.cumsum(dim=1) <= delta, lent, 0.0)
    return p.scatter_add(1, near, -lent).scatter_add(1, token, lent.sum(dim=1, keepdim=True))
