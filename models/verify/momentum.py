"""Momentum decoding: text is a walk through a graph of tokens, and going round in circles there meets resistance.

Tokens are nodes, and the text so far is the walk. Of the k likeliest next tokens the one of highest

    p(token) − α · f(d)

comes next, d being how many steps the walk would have gone along itself: the longest end of the text, with the token,
that stands in the text already, counted up to 5. New tokens meet no resistance, f(0) = 0, and f = 1, 3, 4, 5, 6 from
there, as in the authors' code. So no five tokens in a row ever come twice while one of the k is new and α > 1/6.

Not lossless: the output is not the target's greedy output, which is the point; α = 0 makes it that. Drafted tokens are
verified against momentum decoding's own choice, so that the output is the same with any draft and with none.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from models.core.drafting.proposal import Proposal, Siblings
from models.params import BaseParams
from models.verify import Verified, check_block, common_prefix, emit, expected_of_greedy, follow

PAPER = "arXiv:2212.02175, section 3"
LOSSLESS = False
SAMPLES = False
READS_TEXT = True
SIBLINGS: tuple[Siblings, ...] = ("certain", "certain but one", "independent", "without replacement")
RESISTANCE = (0.0, 1.0, 3.0, 4.0, 5.0, 6.0)  # f, by d


class Params(BaseParams):
    """How hard it is to go in circles."""

    name: Literal["momentum"] = "momentum"
    alpha: float = Field(0.2, ge=0, description="α; 0 is greedy decoding.")
    num_candidates: int = Field(5, ge=1, description="k; 1 is greedy decoding.")


def verify(
    proposal: Proposal, p: Tensor, rng: torch.Generator, params: Params, text: Sequence[Sequence[int]] | None = None
) -> Verified:
    """Verify one drafted tree a block, of which p are logits; without texts as `greedy`; see `models.verify`.
    ValueError also if there is not one text a block."""
    check_block(proposal, p)
    if text is None:
        return follow(proposal, p.argmax(dim=-1))
    if len(text) != len(p):
        raise ValueError(f"rule momentum reads a text for each of {len(p)} blocks, got {len(text)}")
    drafted, ends, final = proposal.token_ids.tolist(), [], []
    for block, logits in enumerate(p):
        row, certain = 0, list(text[block])
        while True:
            token = choice(logits[row], certain, params)
            nodes = [node for node, parent in enumerate(proposal.parents) if parent == row - 1]
            kept = next((node for node in nodes if drafted[block][node] == token), None)
            if kept is None:
                break
            row = kept + 1
            certain.append(token)
        ends.append(row)
        final.append(token)
    return emit(proposal, torch.tensor(ends, device=p.device), torch.tensor(final, device=p.device))


def choice(logits: Tensor, text: Sequence[int], params: Params) -> int:
    """Return the next token by logits [V] of the target and all tokens before it; the first one is the likeliest."""
    chances, tokens = logits.float().softmax(-1).topk(min(params.num_candidates, len(logits)))
    scores = [
        chance - params.alpha * RESISTANCE[steps_along(text, token)]
        for chance, token in zip(chances.tolist(), tokens.tolist(), strict=True)
    ]
    if max(scores) == scores[0]:  # a tie of the likeliest goes to the lower id, as in argmax
        return int(logits.argmax())
    return int(tokens[scores.index(max(scores))])


def steps_along(text: Sequence[int], token: int) -> int:
    """Return d: the most tokens at the end of the text with `token` that stand in the text already, up to 5."""
    most = 0
    for place, there in enumerate(text):
        if there != token:
            continue
        length = 1
        while length < len(RESISTANCE) - 1 and length <= place and text[place - length] == text[-length]:
            length += 1
        most = max(most, length)
    return most


expected_accepted = expected_of_greedy  # of answers that were decoded so
count_accepted = common_prefix  # a rejected token is not the one that comes, so it is never emitted in its place
