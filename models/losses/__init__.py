"""Distillation losses: `loss(drafted: Drafted, params) -> [N]`, one finite value a row, to be made small.

Letters: N rows, D draft vocabulary, H width of what the output matrix multiplies.

A loss's module has `PAPER`, `Params`, and

- `NEEDS`: the columns of `Drafted` that it reads besides `step` and `draft_logits`; the loop computes no others;
- `MINIMUM`: what holds where it is least, of `Minimum`; several may hold at once, and () says that none does.

Its value at a row depends on that row alone, unless `MINIMUM` speaks of a set or of neurons.
"""

from typing import Literal

from torch import Tensor

# distribution: the draft's probabilities are the target's, where the draft can propose all that the target can say.
# token: all of the draft's probability is on the token that came. hidden: draft_hidden is target_hidden, row by row.
# hidden set: the two are the same rows in whatever order. hidden neurons: the same columns in whatever order.
# hidden signs: each entry of the two is on the same side of 0.
Minimum = Literal["distribution", "token", "hidden", "hidden set", "hidden neurons", "hidden signs"]


class Drafted:
    """What one unroll drafted, and what the target says in the same places.

    Only what a loss needs is there; to read another column is an AttributeError.

    Attributes:
        step: number of the unroll, from 0.
        draft_logits: [N, D].
        target_probs: [N, D] the target's probabilities of the draft's tokens, not normalised over them: what is missing
            from 1 is the mass that the draft can't propose.
        token: [N] int64 which of the D tokens came, −1 where it was none of them.
        on_policy: [N] bool: whether the tokens drafted in this row before were the draft's own choice, as in serving.
            False where it was led on by a token that it would not have drafted.
        draft_hidden, target_hidden: [N, H] what the output matrix of either multiplies.
    """

    step: int
    draft_logits: Tensor
    target_probs: Tensor
    token: Tensor
    on_policy: Tensor
    draft_hidden: Tensor
    target_hidden: Tensor

    def __init__(self, step: int, draft_logits: Tensor, **columns: Tensor) -> None:
        """Hold columns by name.

        Raises:
            ValueError: two that are compared have different shapes.
        """
        like = {"target_probs": draft_logits, "target_hidden": columns.get("draft_hidden")}
        for name, column in columns.items():
            wanted = like.get(name)
            if len(column) != len(draft_logits) or (wanted is not None and column.shape != wanted.shape):
                shapes = {key: list(value.shape) for key, value in {"draft_logits": draft_logits, **columns}.items()}
                raise ValueError(f"{name} does not fit the other columns: {shapes}")
        self.__dict__.update(step=step, draft_logits=draft_logits, **columns)
