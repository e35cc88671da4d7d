"""What makes DFlash draft right on a CPU, also after a swap.

DFlash norms the injected keys of all layers in one call, and multiplies by a copy of its layers' matrices. Here each
layer norms with its own gains, and its own product computes keys and values, with the queries thrown away.

Replaces: `vllm.model_executor.models.qwen3_dflash.DFlashQwen3Model._normalize_context_k`,
    `vllm.model_executor.models.qwen3_dflash.DFlashQwen3Model._build_context_kv_buffers`.
Tried with: vLLM 0.32.
No hook: a model of one's own under another name would be a copy of the file, and checkpoints name vLLM's.
Without it: a CPU reads the gains of the first layer for each, and after a swap the copy is empty, because packed
    matrices have no elements left.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import current_platform


def install() -> None:
    """Put both in place, on CPUs only."""
    if current_platform.is_cpu():
        dflash: Any = DFlashQwen3Model
        dflash._normalize_context_k, dflash._build_context_kv_buffers = norm_by_layer, build_by_layer


def norm_by_layer(model: Any, keys: Tensor) -> Tensor:
    """Norm injected keys [L, T, kv heads, width] over the last axis, each layer with its gains [width]."""
    normed = torch.empty_like(keys)
    for place, one, gains in zip(normed, keys, model._k_norm_weights, strict=True):
        ops.rms_norm(place, one, gains, model._rms_norm_eps)
    return normed


def build_by_layer(model: Any, layers: Sequence[Any], has_bias: bool) -> None:
    """Set what DFlash injects keys and values by, without a copy of the matrices; products add their own bias."""
    model._hidden_norm_weight = model.hidden_norm.weight.data
    model._context_qkv_projs = [attention.qkv_proj for attention in layers]
    model._context_q_sizes = [attention.q_size for attention in layers]
    model._fused_kv_weight = model._fused_kv_bias = None  # as where weights are quantized
    model._k_norm_weights = torch.stack([attention.k_norm.weight.data for attention in layers])
