"""Medusa: K heads on the target's last hidden state, each of which drafts a place of its own without asking the others.

    q_k(·) = softmax(W₂ᵏ (SiLU(W₁ᵏ h + b) + h))

h is the state of the token before the last certain one, which the target itself has said. As the heads do not depend on
each other, a tree of their likeliest tokens costs no more passes than a chain, and siblings have equal children. They
are trained as Medusa-1, with the target frozen: cross-entropy on the tokens that came, 0.8ᵏ for head k, every head on
every row.

A draft of the target's whole vocabulary is in the layout of vLLM's Medusa, and served. There each head has a matrix of
the whole vocabulary, and all heads draft in every step, so there are as many as tokens are drafted (read in vLLM 0.32:
model_executor/models/medusa.py, v1/spec_decode/medusa.py). It drafts its likeliest tokens at any temperature.
"""

from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from models.core.drafting.draft_format import engine_weights, require_whole_vocabulary
from models.core.drafting.heads import SIZES, Format, Heads, HeadsParams
from models.drafts import Procedure
from models.losses import cross_entropy

PAPER = "arXiv:2401.10774, sections 3.1 and 3.2 (Medusa-1)"
FAMILY = "medusa"
ARCHITECTURES = ("MedusaModel",)
SERVED = True
FIXED_K = True


class Params(HeadsParams):
    """Shape of new heads."""

    name: Literal["medusa"] = "medusa"


class Medusa(Heads):
    procedure = Procedure(loss=cross_entropy.Params(), follow="all", step_decay=0.8)

    def num_inputs(self, head: int) -> int:
        return 1

    def inputs(self, head: int, state: Tensor, token_ids: Tensor) -> Tensor:
        return state


_format = Format(FAMILY, ARCHITECTURES, Medusa, SIZES)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_weights = engine_weights


def require_served(params: Params, num_draft_tokens: int) -> None:
    require_whole_vocabulary(FAMILY, params.vocab_size, 0)
    if params.num_heads != num_draft_tokens:
        raise ValueError(
            f"vLLM drafts with every Medusa head in every step; got {params.num_heads} heads for "
            f"{num_draft_tokens} tokens: set num_heads = {num_draft_tokens} in [draft]"
        )


def vllm_config(directory: Path) -> dict[str, Any]:
    """See `models.drafts.Family`; ValueError for heads of a part of the vocabulary."""
    config = _format.read(directory)
    require_whole_vocabulary(FAMILY, config["truncated_vocab_size"], config["vocab_size"])
    return {"method": "medusa", "model": str(directory), "num_speculative_tokens": config["num_heads"]}
