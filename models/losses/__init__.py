"""Distillation losses: `loss(drafted: Drafted, params) -> [N]`, one finite value a row, to be made small.

Letters: N rows, D draft vocabulary, H width of what the output matrix multiplies.

A loss's module has `PAPER`, `Params`, and

- `NEEDS`: the columns of `Drafted` that it reads besides `draft_logits`; the loop computes no others;
- `MINIMUM`: what holds where it is least, of `Minimum`; several may hold at once, and () says that none does.

Its value at a row depends on that row alone, unless `MINIMUM` speaks of neurons.
"""

from typing import Literal

import torch
from torch import Tensor

# distribution: the draft's probabilities are the target's, where the draft can propose all that the target can say.
# token: all of the draft's probability is on the token that came. hidden: draft_hidden is target_hidden, row by row.
# hidden neurons: the two are the same columns in whatever order.
# hidden signs: each entry of the two is on the same side of 0.
Minimum = Literal["distribution", "token", "hidden", "hidden neurons", "hidden signs"]


class Drafted:
    """What one unroll drafted, and what the target says in the same places.

    Only what a loss needs is there; to read another column is an AttributeError. `target_probs` are not normalised over
    the draft's tokens: what is missing from 1 is the mass that it can't propose.
    """

    draft_logits: Tensor  # [N, D]
    target_probs: Tensor  # [N, D]
    token: Tensor  # [N] int64 which of the D tokens came, −1 where it was none of them
    draft_hidden: Tensor  # [N, H] what its output matrix multiplies
    target_hidden: Tensor  # [N, H] what the target's does

    def __init__(self, draft_logits: Tensor, **columns: Tensor) -> None:
        """Hold columns by name; ValueError if two that are compared have different shapes."""
        like = {"target_probs": draft_logits, "target_hidden": columns.get("draft_hidden")}
        for name, column in columns.items():
            wanted = like.get(name)
            if len(column) != len(draft_logits) or (wanted is not None and column.shape != wanted.shape):
                shapes = {key: list(value.shape) for key, value in {"draft_logits": draft_logits, **columns}.items()}
                raise ValueError(f"{name} does not fit the other columns: {shapes}")
        self.__dict__.update(draft_logits=draft_logits, **columns)

    def cross_entropy(self) -> Tensor:
        """[N] float32 to the target's distribution, −Σ p(v) log q(v)."""
        return -(self.target_probs.float() * self.draft_logits.float().log_softmax(-1)).sum(-1)

    def log_prob(self) -> Tensor:
        """[N] float32, log q of the token that came, 0 where the draft can't propose it."""
        log_q = self.draft_logits.float().log_softmax(-1)
        return torch.where(self.token >= 0, log_q.gather(-1, self.token.clamp(min=0)[:, None])[:, 0], 0.0)

    def acceptance(self) -> Tensor:
        """[N] float32, Σ min(p, q), the probability that a token drawn from the draft is kept."""
        return torch.minimum(self.target_probs.float(), self.draft_logits.float().softmax(-1)).sum(-1)
