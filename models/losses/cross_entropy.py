"""Cross-entropy on the token that came: −log q(token), 0 where the draft can't propose it.

Hard labels. With answers that the target gave, it is sequence-level distillation; on text by anybody, training as of
any language model.
"""

from typing import Literal

import torch
from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:1606.07947, section 3.2; of drafts: arXiv:2411.11055"
NEEDS = ("token",)
MINIMUM: tuple[Minimum, ...] = ("token",)


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["cross_entropy"] = "cross_entropy"


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    log_q = drafted.draft_logits.float().log_softmax(-1)
    said = log_q.gather(-1, drafted.token.clamp(min=0)[:, None])[:, 0]
    return torch.where(drafted.token >= 0, -said, 0.0)
