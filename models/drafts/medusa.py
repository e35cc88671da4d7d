"""Medusa: K heads on the target's last hidden state, each of which drafts a place of its own without asking the others.

    q_k(·) = softmax(W₂ᵏ (SiLU(W₁ᵏ h + b) + h))

h is the state of the token before the last certain one, which the target itself has said. As the heads do not depend on
each other, a tree of their likeliest tokens costs no more passes than a chain, and siblings have equal children. They
are trained as Medusa-1, with the target frozen: cross-entropy on the tokens that came, 0.8ᵏ for head k, every head on
every row.

A draft of the target's whole vocabulary is in the layout of vLLM's Medusa: stock vLLM 0.32 drafted with one on a CPU,
and accepted as much of it as the reference engine.
"""

from typing import Literal

from torch import Tensor

from models.drafts import Procedure
from models.heads import Format, Heads, HeadsParams
from models.losses import cross_entropy

PAPER = "arXiv:2401.10774, sections 3.1 and 3.2 (Medusa-1)"
FAMILY = "medusa"
ARCHITECTURES = ("MedusaModel",)
TRAINED = True
SERVED = False
# Read in vLLM 0.32: model_executor/models/medusa.py, v1/spec_decode/medusa.py.
UNSERVED = (
    "vLLM's Medusa heads have a matrix of the target's whole vocabulary each, or share one, and all of them draft in "
    "every step"
)


class Params(HeadsParams):
    """Shape of new heads."""

    name: Literal["medusa"] = "medusa"


class Medusa(Heads):
    """See `models.heads.Heads`."""

    procedure = Procedure(loss=cross_entropy.Params(), follow="all", step_decay=0.8)

    def num_inputs(self, head: int) -> int:
        """One: the state."""
        return 1

    def inputs(self, head: int, state: Tensor, token_ids: Tensor) -> Tensor:
        """Return the state; drafted tokens are not read."""
        return state


_format = Format(FAMILY, ARCHITECTURES, "medusa", Medusa)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights
