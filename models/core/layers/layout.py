"""The parts of a decoder block of Llama's layout, as type checkers see them.

transformers makes the real ones, for each architecture of classes of its own, and what an `nn.Module` holds has no type
unless a class says so. None of these is ever made: `blocks` promises them.
"""

from collections.abc import Sequence
from typing import cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class Norm(nn.Module):
    """An RMSNorm."""

    weight: nn.Parameter


class Attention(nn.Module):
    """A block's attention; `head_dim` is the width of a head."""

    config: PreTrainedConfig
    head_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


class Mlp(nn.Module):
    """A block's MLP."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


class Block(nn.Module):
    """A decoder block."""

    input_layernorm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm
    mlp: Mlp


def blocks(model: PreTrainedModel) -> Sequence[Block]:
    """Return the decoder blocks; ValueError if the model is not of Llama's layout."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no model.layers; models of Llama's layout are handled")
    return cast("Sequence[Block]", layers)
