"""Judge decoding: keep the target's likeliest token, and others that a head on the target's hidden state finds good.

The state of a drafted token, in the pass that verifies it, tells whether it is wrong, since the target is about to go
on from it: a linear head reads it there. A child is kept if it is the target's likeliest token, else the likeliest of
those with

    σ(w · h + b) > τ

and after the path the target's likeliest token comes. Without a head the rule is `greedy`.

Not lossless: what the head lets pass is emitted for good, however unlikely the target finds it, and all that follows
goes on from it. No bound holds but that of the head, whose mistakes on tokens that it was not fit on have to be
measured. The paper's head was fit on answers whose wrong tokens people had marked;
`fit_marked` takes such marks from whoever made them, `fit` a file of them that a recipe names.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from models.core.drafting.proposal import Proposal, Siblings
from models.core.layers.decoder import Cache, Decoder
from models.core.learning import binary_head
from models.core.learning.hidden import Sample
from models.drafts import Draft
from models.params import BaseParams
from models.verify import Verified, check_block, children, common_prefix, emit, expected_of_greedy

PAPER = "arXiv:2501.19309"
FILE = "judge.safetensors"
FITS = ("marks", "bad_weight")
LOSSLESS = False
SAMPLES = False
READS_STATES = True
SIBLINGS: tuple[Siblings, ...] = ("certain", "certain but one", "independent", "without replacement")


class Params(BaseParams):
    """Whose judgement is trusted, and how far."""

    name: Literal["judge"] = "judge"
    head: Path | None = Field(
        None, description="a file that `fit` or `fit_marked` wrote; None keeps the target's own tokens alone."
    )
    threshold: float = Field(0.5, ge=0, le=1, description="τ; 1 keeps no others.")
    marks: Path | None = Field(
        None, description='texts to fit a head to, JSON a line: {"token_ids": [5, 7, 9], "good": {"2": false}}.'
    )
    bad_weight: float = Field(1.0, gt=0, description="how much more than a good token a bad one counts while it is.")


class Marked(NamedTuple):
    """A text, and which of its tokens are good."""

    token_ids: Sequence[int]  # of the whole text, prompt included
    good: dict[int, bool]  # place of a token to whether it is good; others are not looked at


def verify(
    proposal: Proposal, p: Tensor, rng: torch.Generator, params: Params, states: Tensor | None = None
) -> Verified:
    """Verify one drafted tree a block; see `models.verify`. ValueError also if there is a head and no states, or it is
    one of another width."""
    check_block(proposal, p)
    best = p.argmax(dim=-1)
    parents = [parent + 1 for parent in proposal.parents]
    right = proposal.token_ids == best[:, parents]
    passes = right | _judged(proposal, states, params).to(right.device)
    likely = p[:, parents].gather(-1, proposal.token_ids[..., None])[..., 0].masked_fill(~passes, float("-inf"))
    ends = torch.zeros(len(p), dtype=torch.int64, device=p.device)
    for row, nodes in children(proposal):
        first = torch.tensor(nodes, device=p.device)[likely[:, nodes].argmax(dim=1)]
        kept = (ends == row) & passes.gather(1, first[:, None])[:, 0]
        ends = torch.where(kept, first + 1, ends)
    return emit(proposal, ends, best.gather(1, ends[:, None])[:, 0])


def expected_accepted(token_ids: Tensor, q: Tensor, p: Tensor, params: Params) -> Tensor:
    """Return what `greedy` expects of a chain; ValueError if there is a head."""
    if params.head is not None:
        raise ValueError("rule judge keeps tokens that a head finds good; the target's answers don't tell")
    return expected_of_greedy(token_ids, q, p, params)


count_accepted = common_prefix  # a rejected token is not the target's, so it is never emitted in its place


def require_fit(params: Params) -> None:
    """Raise ValueError where settings name no file of marks."""
    if params.marks is None:
        raise ValueError("verify judge is fit to marked texts; name their file as marks")


def fit(
    draft: Draft,
    target_dir: Path,
    samples: Sequence[Sample],
    num_draft_tokens: int,
    work_dir: Path,
    params: Params,
    seed: int,
) -> Params:
    """Fit a head to the marked texts of a file; see `models.core.learning.fitted`.

    Samples are not read: the target's answers tell nothing of other tokens that are good. ValueError if no file is
    named, it can't be read, or `fit_marked` refuses what it says.
    """
    require_fit(params)
    assert params.marks is not None
    fit_marked(
        Decoder.load(target_dir, torch.float32), read_marks(params.marks), work_dir / FILE, params.bad_weight, seed
    )
    return params.model_copy(update={"head": work_dir / FILE})


def read_marks(file: Path) -> list[Marked]:
    """Read marked texts; see `Params`. ValueError if the file can't be read, or a line is no such text."""
    try:
        lines = file.read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return [
            Marked(list(row["token_ids"]), {int(place): bool(good) for place, good in row["good"].items()})
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{file} holds no marked texts such as {{"token_ids": [5], "good": {{"0": true}}}}: {error!r}'
        ) from error


@torch.inference_mode()
def fit_marked(decoder: Decoder, texts: Sequence[Marked], file: Path, bad_weight: float = 1.0, seed: int = 0) -> None:
    """Fit a head to marked tokens and write it, for `Params.head`; ValueError if all marked tokens are good, or all
    bad, or a place is outside of its text."""
    states: list[Tensor] = []
    labels: list[bool] = []
    for text in texts:
        if any(not 0 <= place < len(text.token_ids) for place in text.good):
            raise ValueError(f"marked places must be from 0 to {len(text.token_ids) - 1}, got {sorted(text.good)}")
        read = torch.tensor(list(text.token_ids), device=decoder.device)
        states.append(decoder.forward(read, Cache(decoder, len(read)))[0][list(text.good)].float().cpu())
        labels += text.good.values()
    if len(set(labels)) < 2:
        raise ValueError(f"wanted tokens that are good and tokens that are bad; got {len(labels)} marks of one kind")
    head = binary_head.fit(torch.cat(states), torch.tensor(labels).float(), 0, bad_weight, seed)
    binary_head.save(head, file)


def _judged(proposal: Proposal, states: Tensor | None, params: Params) -> Tensor:
    """[B, N] whether the head finds each drafted token good."""
    if params.head is None:
        return torch.zeros_like(proposal.token_ids, dtype=torch.bool)
    if states is None or states.shape[:2] != (len(proposal.token_ids), proposal.num_tokens + 1):
        got = None if states is None else list(states.shape)
        raise ValueError(
            f"rule judge reads states [{len(proposal.token_ids)}, {proposal.num_tokens + 1}, H]; got {got}"
        )
    head = binary_head.load(params.head, states.shape[-1])
    good: Tensor = head(states[:, 1:].cpu()).sigmoid() > params.threshold
    return good
