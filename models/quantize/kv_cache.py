"""8-bit keys and values: twice the context in the same memory.

Letters: B sequences, K heads of keys and values, T tokens, D width of a head.

Keys are rounded as they are cached, after their rotation. "int8" has a float32 scale a token and head (largest
magnitude / 127); "fp8" is e4m3 without a scale, which engines call fp8 with scale 1: magnitudes over 448 are clipped.
All tokens that are attended to are rounded, the one that asks too, as an engine does that attends over its cache; one
that computes a prompt before caching it is a little more exact there.

An engine does this by a setting of its own, not by a checkpoint (vLLM: `kv_cache_dtype` "int8_per_token_head", GPU
only, or "fp8").
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from models.core.layers.integers import HIGH, token_scales
from models.core.layers.linears import blocks
from models.params import BaseParams
from models.quantize import Quantized, assemble, check

PAPER = "arXiv:2303.06865, section 4 (compressed cache); arXiv:2211.05102 (what a cache costs)"
CALIBRATED = False
STORED = None
ELSEWHERE = 'an engine rounds its cache by itself, no checkpoint does: [engine] extra = { kv_cache_dtype = "fp8" }'


class Params(BaseParams):
    """The form of the cache."""

    name: Literal["kv_cache"] = "kv_cache"
    form: Literal["int8", "fp8"] = Field("int8", description="of a cached number.")


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Let the model attend over rounded keys and values; figure `kv_bytes_per_token` of its cache."""
    check(model)
    attention = f"rounded_kv_cache_{params.form}"
    AttentionInterface.register(attention, partial(_attend, _ROUND[params.form]))
    AttentionMaskInterface.register(attention, sdpa_mask)
    width = 0
    for block in blocks(model):
        config = block.self_attn.config
        # Keys and values each; int8 has a float32 scale beside.
        width += 2 * config.num_key_value_heads * (block.self_attn.head_dim + (4 if params.form == "int8" else 0))
    model.config._attn_implementation = attention
    return assemble(model, {}, figures={"kv_bytes_per_token": float(width)})


def _attend(
    round_cached: Callable[[Tensor], Tensor],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    attended, _ = sdpa_attention_forward(
        module, query, round_cached(key), round_cached(value), attention_mask, **settings
    )
    return attended, None


def _int8(states: Tensor) -> Tensor:
    """[B, K, T, D], each D with a scale of its own."""
    scales = token_scales(states)
    return (states / scales).round().clamp(-HIGH, HIGH) * scales


def _fp8(states: Tensor) -> Tensor:
    return states.clamp(-448, 448).to(torch.float8_e4m3fn).to(states.dtype)


_ROUND: dict[str, Callable[[Tensor], Tensor]] = {"int8": _int8, "fp8": _fp8}
