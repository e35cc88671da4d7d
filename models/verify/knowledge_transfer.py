"""RAPID's rule: the target is first moved towards the draft, which may know what the target misses in a long prompt.

    p̂ ∝ p · exp(η t),   t(x) = q(x) − p(x) where q(x) ≥ α max q, else 0

is the target after one step of size η down the gradient of KL(q ‖ p), taken at its logits; q's unlikely tokens, of
which the draft is not to be believed, stay. x is kept with min(1, p̂(x) / q(x)), else max(p − min(q, p̂), 0), made to
sum to 1, is what is left for the next child, or for the token that is emitted.

Not lossless. With one drafted token the total variation between the emitted token and p is Σ max(min(q, p̂) − p, 0), so
at most that of q and p, and at most tanh(η / 2). With η = 0 the rule is `rejection`. α is in the paper's code alone.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from models.core.drafting.proposal import Choice, Siblings
from models.params import BaseParams
from models.verify import by_choice, expected_of_chain, reject_in_turn

PAPER = "arXiv:2502.20330, section 3.3"
LOSSLESS = False
SAMPLES = True
SIBLINGS: tuple[Siblings, ...] = ("independent", "without replacement", "certain", "certain but one")


class Params(BaseParams):
    """How far the draft is believed.

    Attributes:
        eta: η, the size of the step; 0 for not at all.
        alpha: α, the share of the draft's highest probability from which it is believed of a token.
    """

    name: Literal["knowledge_transfer"] = "knowledge_transfer"
    eta: float = Field(10.0, ge=0)
    alpha: float = Field(0.1, ge=0, le=1)


def choose(p: Tensor, token_ids: Tensor, q: Tensor, params: Params) -> Choice:
    """Try the children of a node in turn; see `models.verify`."""
    return reject_in_turn(p, token_ids, q, lambda p, token, law: (transferred(p, law, params), p))


verify = by_choice(choose)


def transferred(p: Tensor, q: Tensor, params: Params) -> Tensor:
    """Return p̂ […, V], the target moved towards the draft; 0 where p is."""
    believed = q >= params.alpha * q.amax(dim=-1, keepdim=True)
    return torch.softmax(p.log() + params.eta * torch.where(believed, q - p, 0.0), dim=-1)


def expected_accepted(token_ids: Tensor, q: Tensor, p: Tensor, params: Params) -> Tensor:
    """Return what is expected of a chain; see `models.verify`."""
    p, q = p.float(), q.float()
    return expected_of_chain(token_ids, p, torch.minimum(q, transferred(p, q, params)))


def count_accepted(drafted: Sequence[int], emitted: Sequence[int]) -> int:
    """Raise ValueError: a rejected token may be drawn from what is left of p, so that ids don't tell."""
    raise ValueError(
        "rule knowledge_transfer may emit a token that it rejected; what was accepted can't be told from ids"
    )
