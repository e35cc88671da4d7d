"""A model of a smaller shape out of a model's own weights: fewer blocks, fewer heads, narrower, fewer tokens.

Every result is a new model of the same class, built from a config that says its shape, so that nothing of the old shape
is left in it (layer numbers, types of layers, cached sizes). Llama's layout is what is known here: tensors are told
apart by name, and an unknown one is refused instead of being copied as it is.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from models.core.checkpoints.loading import moved
from models.core.layers.linears import blocks

# Which width each axis of a module's weight has; a bias has the first one's.
_AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("tokens", "hidden"),
    "lm_head": ("tokens", "hidden"),
    "q_proj": ("heads", "hidden"),
    "k_proj": ("kv_heads", "hidden"),
    "v_proj": ("kv_heads", "hidden"),
    "o_proj": ("hidden", "heads"),
    "gate_proj": ("channels", "hidden"),
    "up_proj": ("channels", "hidden"),
    "down_proj": ("hidden", "channels"),
    "input_layernorm": ("hidden",),
    "post_attention_layernorm": ("hidden",),
    "norm": ("hidden",),
    "q_norm": ("head_dim",),
    "k_norm": ("head_dim",),
}


class Kept(NamedTuple):
    """What stays of a model's widths, ascending int64; None keeps all.

    [V'] tokens of the vocabulary, [H'] of the hidden width, and of each of L blocks [L, A'] query heads, equally many
    of each KV head that stays, [L, K'] KV heads and [L, C'] channels of the MLP.
    """

    tokens: Tensor | None = None
    hidden: Tensor | None = None
    heads: Tensor | None = None
    kv_heads: Tensor | None = None
    channels: Tensor | None = None


def spread_layers(num_layers: int, num_kept: int) -> list[int]:
    """Return `num_kept` of `num_layers` blocks, evenly spread from the first to the last."""
    return list(np.linspace(0, num_layers - 1, num_kept).round().astype(int).tolist())


def take_layers(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """Return a model of the blocks whose numbers are kept, ascending, else ValueError; `model` stays as it is."""
    num_layers = len(blocks(model))
    if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < num_layers:
        raise ValueError(f"kept layers must ascend within 0 to {num_layers - 1}; got {list(kept)}")
    place = {number: index for index, number in enumerate(kept)}
    tensors = {}
    for name, tensor in model.state_dict().items():
        block = _block_of(name)
        if block is None:
            tensors[name] = tensor
        elif block in place:
            tensors[name.replace(f"layers.{block}.", f"layers.{place[block]}.", 1)] = tensor
    changes: dict[str, Any] = {"num_hidden_layers": len(kept)}
    if getattr(model.config, "layer_types", None):
        changes["layer_types"] = [model.config.layer_types[number] for number in kept]
    return _build(model, changes, tensors)


def take_widths(model: PreTrainedModel, kept: Kept) -> PreTrainedModel:
    """Return a model with some of `model`'s channels, heads or tokens; ValueError names a tensor not of Llama's."""
    width = head_dim(model.config)
    changes: dict[str, Any] = {"head_dim": width}
    for key, places in (
        ("vocab_size", kept.tokens),
        ("hidden_size", kept.hidden),
        ("num_attention_heads", kept.heads),
        ("num_key_value_heads", kept.kv_heads),
        ("intermediate_size", kept.channels),
    ):
        if places is not None:
            changes[key] = places.shape[-1]
    tensors = {}
    for name, tensor in model.state_dict().items():
        block, (*_, module, leaf) = _block_of(name), name.split(".")
        if module not in _AXES or leaf not in ("weight", "bias"):
            raise ValueError(f"tensor {name} is not one of a model of Llama's layout, so its widths are not known")
        for axis, kind in enumerate(_AXES[module][: tensor.ndim]):
            places = getattr(kept, kind, None)
            if places is None:
                continue
            if kind in ("heads", "kv_heads"):
                places = (places[block][:, None] * width + torch.arange(width)).flatten()
            elif kind == "channels":
                places = places[block]
            tensor = tensor.index_select(axis, places.to(tensor.device))
        tensors[name] = tensor
    return _build(model, changes, tensors)


def head_dim(config: Any) -> int:
    """Return the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _block_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _build(model: PreTrainedModel, changes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(config, key, value)
    if hasattr(config, "redraft"):  # promises of the old shape's layers, by their old names
        config.redraft = {
            key: value for key, value in config.redraft.items() if key not in ("ranks", "factors", "patterns")
        }
    with no_init_weights():
        # Leaves RoPE's buffers in float32.
        built: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    moved(built, model.device)
    built.load_state_dict(dict(tensors))
    built.tie_weights()
    built.generation_config = copy.deepcopy(model.generation_config)
    built.eval()
    return built
