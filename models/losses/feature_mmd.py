"""Neuron selectivity transfer: what the features' neurons answer to is to be alike, whichever neuron it is.

−Σ p(v) log q(v)  +  λ/2 MMD²,   MMD² = mean k(t, t′) + mean k(s, s′) − 2 mean k(t, s),   k(x, y) = (xᵀ y)²

t and s are neurons of the target's and of the draft's feature: a column of the N rows each, of norm 1. They come in
whatever order and number, so that the draft's features need not be the target's for the two to be close. With this
kernel, the paper's best, MMD² is the squared distance of A = mean t tᵀ [N, N] and its like of the draft: how alike rows
are to the neurons. A row's value is N times its own part of that, so that the mean over rows is MMD². The paper's
positions of an image are rows of a batch here, and its label is the target's distribution.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:1707.01219, with the polynomial kernel of degree 2"
NEEDS = ("draft_hidden", "target_hidden", "target_probs")
MINIMUM: tuple[Minimum, ...] = ("hidden neurons", "distribution")


class Params(BaseParams):
    """How the two are weighed."""

    name: Literal["feature_mmd"] = "feature_mmd"
    weight: float = Field(50.0, ge=0, description="λ.")


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    draft, target = (_alike(hidden.float()) for hidden in (drafted.draft_hidden, drafted.target_hidden))
    return drafted.cross_entropy() + params.weight / 2 * len(draft) * (draft - target).square().sum(-1)


def _alike(hidden: Tensor) -> Tensor:
    """[N, H] → [N, N] mean over neurons of what a neuron says of two rows."""
    neurons = functional.normalize(hidden, dim=0)
    return neurons @ neurons.T / hidden.shape[-1]
