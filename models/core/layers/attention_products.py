"""Attention whose two products, of queries by keys and of weights by values, are multiplied in another way.

Letters: B sequences, A query heads, T tokens, D width of a head.

What it replaces is put back by `take_out`; a model attends plainly in evaluation mode unless it was put in for always,
as `models.core.layers.products` has it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from models.core.layers.layout import blocks

# [..., R, I] times [..., C, I] → [..., R, C]: rows by rows, as a linear layer does it.
Pairs = Callable[[Tensor, Tensor], Tensor]
_NAME, _PAIRS = "changed_products", "multiply_pairs"


def put_in(model: PreTrainedModel, multiply: Pairs, always: bool = False) -> str:
    """Let a model's attention multiply by `multiply`, in evaluation mode too if `always`; returns what it was before.

    Raises:
        ValueError: the model is not of Llama's layout.
    """
    before: str = model.config._attn_implementation
    for block in blocks(model):
        setattr(block.self_attn, _PAIRS, (multiply, always))
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, eager_mask)
    model.config._attn_implementation = _NAME
    return before


def take_out(model: PreTrainedModel, before: str) -> None:
    """Take back what `put_in` did, which returned `before`."""
    for block in blocks(model):
        delattr(block.self_attn, _PAIRS)
    model.config._attn_implementation = before


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """[B, A, T, D] queries to [B, T, A, D]."""
    multiply, always = getattr(module, _PAIRS)
    if not module.training and not always:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **settings
        )
        return plain
    num_groups = query.shape[1] // key.shape[1]
    scores = multiply(query, repeat_kv(key, num_groups)) * scaling + attention_mask
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    attended: Tensor = multiply(weights, repeat_kv(value, num_groups).mT)
    return attended.transpose(1, 2).contiguous(), weights
