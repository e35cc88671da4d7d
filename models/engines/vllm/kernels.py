"""What makes drafting, and sampling under speculation, right on a CPU.

vLLM 0.32's CPU stand-in for `expand_kernel` computes into a copy, so temperature, top-p and top-k of the verified
tokens are whatever the memory held (vllm-project/vllm#55005). Greedy decoding does not read them, which is how it goes
unseen.

A step in which nothing is verified, as one that reads a prompt, hands on an empty tensor of top-k, and where no request
has a top-p, its CPU code then takes the largest value of none: that ends the engine.

DFlash norms the injected keys of all layers in one call, which on a CPU reads the gains of the first layer for each,
and multiplies by a copy of its matrices, which is empty after a swap, because packed matrices have no elements left.
Here each layer norms with its own gains, and its own product computes keys and values, with the queries thrown away.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

NAME = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(
    output: Tensor, values: Tensor, ends: Tensor, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int | None = None
) -> None:
    """Repeat each request's value over its drafted tokens, in place.

    Args:
        output: [num_tokens] written.
        values: [B] one a request.
        ends: [B] cumulative number of drafted tokens.
        replace_from: a value that is written as `replace_to`.
        replace_to: see there.
        MAX_NUM_TOKENS: a bound that the compiled kernel needs; the name is the caller's.
    """
    counts = torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(torch.repeat_interleave(replaced, counts))


def on_rows(constrain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what leaves logits [num_tokens, V] of no tokens alone, and does as `constrain` with others."""

    @wraps(constrain)
    def constrained(logits: Tensor, *limits: Tensor | None) -> Tensor:
        return constrain(logits, *limits) if len(logits) else logits

    return constrained


def norm_by_layer(model: Any, keys: Tensor) -> Tensor:
    """Norm injected keys; in place of DFlash's own method.

    Args:
        model: DFlash's module, whose `_k_norm_weights` are [L, width].
        keys: [L, T, kv heads, width].

    Returns:
        as `keys`, normed over the last axis, each layer with its gains.
    """
    from vllm import _custom_ops

    normed = torch.empty_like(keys)
    for place, one, gains in zip(normed, keys, model._k_norm_weights, strict=True):
        _custom_ops.rms_norm(place, one, gains, model._rms_norm_eps)
    return normed


def build_by_layer(model: Any, layers: Sequence[Any], has_bias: bool) -> None:
    """Set what DFlash injects keys and values by, without a copy of the matrices; in place of its own method.

    Args:
        model: DFlash's module.
        layers: the attention of each.
        has_bias: whether their products have a bias, which they add themselves.
    """
    model._hidden_norm_weight = model.hidden_norm.weight.data
    model._context_qkv_projs = [attention.qkv_proj for attention in layers]
    model._context_q_sizes = [attention.q_size for attention in layers]
    model._fused_kv_weight = model._fused_kv_bias = None  # as where weights are quantized
    model._k_norm_weights = torch.stack([attention.k_norm.weight.data for attention in layers])


def install() -> None:
    """Put all in place, on CPUs only. The worker does so as it imports its extension; a plugin runs too early."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.platforms import current_platform
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    if current_platform.is_cpu():
        register_kernels({NAME: expand})
        # The module calls it by this name.
        rejection_sampler.apply_top_k_top_p = on_rows(apply_top_k_top_p)  # type: ignore[attr-defined]  # not exported
        dflash: Any = DFlashQwen3Model
        dflash._normalize_context_k = norm_by_layer
        dflash._build_context_kv_buffers = build_by_layer
