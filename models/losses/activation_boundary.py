"""Activation boundaries: which neurons are on is to be as in the target, by a margin; how strongly is left open.

−Σ p(v) log q(v)  +  w · the mean over H of (1[t > 0] (μ − s)₊ + 1[t ≤ 0] (μ + s)₊)²

t and s are entries of the target's and of the draft's feature. The paper's are of a layer before its ReLU, which it
teaches first and labels after; here they are of what the output matrix multiplies, and the two are learnt together.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:1811.03233"
NEEDS = ("draft_hidden", "target_hidden", "target_probs")
MINIMUM: tuple[Minimum, ...] = ("hidden signs", "distribution")


class Params(BaseParams):
    """How the two are weighed, and how far on its side an entry is to be."""

    name: Literal["activation_boundary"] = "activation_boundary"
    weight: float = Field(1.0, ge=0, description="w.")
    margin: float = Field(1.0, gt=0, description="μ.")


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    draft = drafted.draft_hidden.float()
    short = functional.relu(params.margin - torch.where(drafted.target_hidden > 0, draft, -draft))
    return drafted.cross_entropy() + params.weight * short.square().mean(-1)
