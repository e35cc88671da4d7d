"""The parts of a decoder block of Llama's layout, as type checkers see them.

transformers makes the real ones, for each architecture of classes of its own, and what an `nn.Module` holds has no type
unless a class says so. None of these is ever made: `models.layers.linears.blocks` promises them.
"""

from torch import nn
from transformers import PreTrainedConfig


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
