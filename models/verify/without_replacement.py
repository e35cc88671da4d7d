"""Recursive rejection sampling of RSD: children of a node are all different, each drawn from what the ones before left.

With q¹ = q, and qⁱ⁺¹ = q without the first i children, made to sum to 1, child i is kept with min(1, pⁱ(x) / qⁱ(x)),
else pⁱ⁺¹ = max(pⁱ − qⁱ, 0), made to sum to 1. The rounds are those of `rejection`; here children must be different. No
row of the target's pass goes to a token twice, which is why more is kept than of as many independent children.
"""

from typing import Literal

from torch import Tensor

from models.core.drafting.proposal import Choice, Siblings
from models.params import BaseParams
from models.verify import by_choice, common_prefix, expected_of_rejection, reject_in_turn

PAPER = "arXiv:2402.14160, recursive rejection sampling"
LOSSLESS = True
SAMPLES = True
SIBLINGS: tuple[Siblings, ...] = ("without replacement", "certain", "certain but one")


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["without_replacement"] = "without_replacement"


def choose(p: Tensor, token_ids: Tensor, q: Tensor, params: Params) -> Choice:
    """Try the children of a node in turn; see `models.verify.reject_in_turn`. ValueError if a child was drawn from a q
    in which an earlier one has probability, so not without replacement."""
    for number in range(1, token_ids.shape[1]):
        if (q[:, number].gather(1, token_ids[:, :number]) > 0).any():
            raise ValueError(
                f"child {number + 1} of a node was drawn from a q that an earlier child has probability in; rule "
                'without_replacement wants children drawn without replacement, rule "rejection" takes others'
            )
    return reject_in_turn(p, token_ids, q)


verify = by_choice(choose)
expected_accepted = expected_of_rejection
count_accepted = common_prefix  # a rejected token is never emitted in its place, max(p − q, 0) being 0 there
