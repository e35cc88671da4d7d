"""Clover: one layer over the target's states, then a recurrence that takes in each drafted token without attention.

    A(h, e) = h + cos(Q h, K e) V e                    attention decoder; Q reads h normed, each head has a cosine
    h₀(t) = layer([A₁(f(t), E(x(t+1)))] ≤ t)           augmenting block, once a step; normed
    h_k   = A₂(h_{k−1}, E(x_{k+1}))                     regressive connection: x₁ is certain, x₂ … were drafted
    q     = softmax(W_out u_k),   u₀ = W₁ h₀,  u_k = W₂ [h_k; E(x_{k+1})], normed

f is the target's last residual stream. The attention is over the one token that came last, so its weight is a cosine
and no softmax. E is the target's output matrix, as W_out is; of W_out the rows of the commonest tokens.

The three parts are Clover's. Their order (A₁ before the block), W₁ and W₂, and the training are Clover-2's, as its code
has them: led by the tokens that came, every head on every row, smooth L1 to the feature that the target will have and a
tenth of the cross-entropy to its distribution, 0.7ᵏ for head k. Its block has two layers, this one has one. A new
draft's A₁ and A₂ add nothing, where the code starts them from small chance values, and the norm after the block starts
without the gain of the target's last norm, so that the draft begins by saying what that block makes the target say.
"""

from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from models.core.checkpoints.readout import output_embedding
from models.core.drafting.borrowing import BorrowingDraft, Format
from models.core.drafting.draft_format import LAYER_SIZES
from models.core.drafting.drafters import require_width
from models.core.drafting.features import Scale, decoder_layer, start_as
from models.drafts import Procedure
from models.losses import feature_regression
from models.params import BaseParams

PAPER = "arXiv:2405.00263; arXiv:2408.00264, github.com/XiaoBin1992/clover"
ARCHITECTURES = ("CloverDraft",)
SERVED = False


class Params(BaseParams):
    """Shape of a new draft.

    Attributes:
        vocab_size: D, at most the target's.
        num_heads: tokens one after the other that training drafts from a row. These heads share their weights, so that
            it can draft more.
    """

    name: Literal["clover"] = "clover"
    vocab_size: int = Field(4096, ge=1)
    num_heads: int = Field(5, ge=1)


class AttentionDecoder(nn.Module):
    """Adds what a token says to a state, as much of it as the state asks for."""

    def __init__(self, width: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.eps = num_heads, eps
        self.input_layernorm = Scale(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """[…, H] states and […, H] embeddings of the tokens after them → […, H]."""
        normed = functional.rms_norm(state, state.shape[-1:], self.input_layernorm.weight, self.eps)
        query, key, value = (
            product(read).unflatten(-1, (self.num_heads, -1))
            for product, read in ((self.q, normed), (self.k, embedded), (self.v, embedded))
        )
        weight = functional.cosine_similarity(query, key, dim=-1, eps=self.eps)
        mixed: Tensor = state + (weight[..., None] * value).flatten(-2)
        return mixed

    @torch.no_grad()
    def add_nothing(self) -> None:
        """Let states through as they are; how alike a state and a token are is the cosine of the two."""
        for product in (self.q, self.k, self.v):
            product.bias.zero_()
            product.weight.copy_(torch.eye(len(product.bias)))
        self.v.weight.zero_()


class Clover(BorrowingDraft):
    """The draft; parameters carry the names of the checkpoint.

    Between two steps it hands on the recurrence's state and what is said from it, side by side, [n, 2 H].
    """

    procedure = Procedure(loss=feature_regression.Params(), follow="all", step_decay=0.7)

    def __init__(self, config: dict[str, Any]) -> None:
        """See the base; ValueError if the attention decoder's heads do not divide its width."""
        width, num_heads = config["hidden_size"], config["num_attention_heads"]
        if width % num_heads:
            raise ValueError(f"clover's {num_heads} attention heads share a width that they divide; got {width}")
        super().__init__(config)
        self.max_unroll = config["num_heads"]
        self.before, self.regressive = (AttentionDecoder(width, num_heads, self.eps) for _ in range(2))
        self.layers = nn.ModuleList([decoder_layer(config, width)])
        self.block_norm, self.norm = Scale(width), Scale(width)
        self.first, self.later = nn.Linear(width, width), nn.Linear(2 * width, width)

    def borrow(self, target_dir: Path) -> Self:
        super().borrow(target_dir)
        self.embedding = output_embedding(target_dir)
        return self

    def context(
        self, hidden: Tensor, token_ids: Tensor, start: int = 0, rng: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A₁ comes before the block, so that its keys know the token after each state too."""
        mixed = self.before(self.combine(hidden), functional.embedding(token_ids, self.embedding))
        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)
        return mixed, *self.keys_values(self.join(mixed, token_ids), positions)

    def combine(self, hidden: Tensor) -> Tensor:
        require_width(self, hidden, len(self.target_norm))
        return hidden

    def advance(self, step: int, state: Tensor, token_ids: Tensor, *rest: Any) -> Tensor:
        """The block in the first step, and the recurrence in all that follow; these add no keys."""
        if step == 0:
            told = self.normed(super().advance(step, state, token_ids, *rest), self.block_norm)
            return torch.cat([told, self.first(told)], dim=-1)
        embedded = functional.embedding(token_ids, self.embedding)
        told = self.regressive(state.chunk(2, dim=-1)[0], embedded)
        return torch.cat([told, self.later(torch.cat([told, embedded], dim=-1))], dim=-1)

    def say(self, state: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        return super().say(self.normed(state.chunk(2, dim=-1)[1], self.norm))


_format = Format("clover", ARCHITECTURES, Clover, (*LAYER_SIZES, "num_heads"))
renew, save, load, check = _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Clover:
    """Make a draft whose block is the target's last layer, and to which tokens say nothing yet; see
    `models.drafts.Family`."""
    draft = _format.start(params.vocab_size, {"num_heads": params.num_heads}, target_dir, token_counts)
    with torch.no_grad():
        for decoder in (draft.before, draft.regressive):
            decoder.add_nothing()
        start_as(draft.layer, target_dir, draft.num_target_layers - 1)
        draft.norm.weight.copy_(draft.target_norm)
        for product in (draft.first, draft.later):
            product.bias.zero_()
            product.weight.copy_(torch.eye(*product.weight.shape))
    return draft
