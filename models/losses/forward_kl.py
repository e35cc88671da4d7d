"""Forward KL over the draft vocabulary: Σ p(v) · (log p(v) − log q(v)), up to the target's entropy.

p is not normalised over the draft vocabulary, so a position whose mass lies outside of it, where any draft is rejected,
weighs less.
"""

from typing import Literal

from torch import Tensor

from models.params import BaseParams

PAPER = "arXiv:1503.02531, section 2, at temperature 1"


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["forward_kl"] = "forward_kl"


def loss(draft_logits: Tensor, target_probs: Tensor, params: Params) -> Tensor:
    """Return the loss of each row.

    Args:
        draft_logits: [N, D].
        target_probs: [N, D], non-negative.
        params: nothing to set.

    Returns:
        [N] float32, without the entropy term, which no draft can change.

    Raises:
        ValueError: the shapes differ.
    """
    if draft_logits.shape != target_probs.shape:
        raise ValueError(
            f"draft_logits are {list(draft_logits.shape)}, target_probs {list(target_probs.shape)}; wanted the same"
        )
    return -(target_probs.float() * draft_logits.float().log_softmax(-1)).sum(-1)
