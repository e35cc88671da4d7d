"""Squared maximum mean discrepancy of the hidden states as two sets, with a Gaussian kernel."""

from typing import Literal

import torch
from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "made up"
NEEDS = ("draft_hidden", "target_hidden")
MINIMUM: tuple[Minimum, ...] = ("hidden set",)


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["mean_discrepancy"] = "mean_discrepancy"


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] each row's part."""
    draft, target = drafted.draft_hidden.float(), drafted.target_hidden
    within, target_within, across = (_kernel(a, b) for a, b in ((draft, draft), (target, target), (draft, target)))
    return (within + target_within - across - across.T).mean(-1)


def _kernel(left: Tensor, right: Tensor) -> Tensor:
    return torch.exp(-(left[:, None] - right[None]).square().sum(-1) / left.shape[-1])
