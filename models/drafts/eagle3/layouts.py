"""The layouts that EAGLE-3 heads are published in, brought to one.

Two are read, as vLLM's loader reads them (model_executor/models/llama_eagle3.py,
transformers_utils/configs/speculators):

- native, of the original repositories: a flat Llama config, tensors `midlayer.*`;
- `speculators`: the layer's settings in `transformer_layer_config` and the head's beside it, tensors `layers.0.*`.

vLLM maps the tensors' names in both alike and never reads `t2d`. What it assumes where a config is silent differs: a
speculators head norms before the residual, a native one after; taps that are not named are (2, n // 2, n − 3) of n
target layers. Taps are fed in ascending order, whatever order they are named in.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig

# The last one is what the first heads called themselves.
NATIVE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
LAYER_NAMES = ("midlayer.", "layers.0.")
TAPS = "eagle_aux_hidden_state_layer_ids"
# What vLLM knows of a head and the heads here do not have: setting to the value that leaves it out.
UNSUPPORTED = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "attention_bias": False,
    "mlp_bias": False,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
}


class Published(NamedTuple):
    """A published head.

    Attributes:
        layer: the shape of its one decoder layer.
        draft_vocab_size: D, the target's vocabulary size where the config names none.
        taps: residual streams of the target, counted as layers done, ascending.
        norm_before_residual: whether the residual is the normed hidden state.
        tensors: by native names, floats in bfloat16.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool
    tensors: dict[str, Tensor]


def is_published(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is a head's, of either layout."""
    if (kind := config.get("speculators_model_type")) is not None:
        return bool(kind == "eagle3")
    return config.get("architectures") in [[name] for name in NATIVE] and "draft_vocab_size" in config


def read_published(config: Mapping[str, Any], tensors: Mapping[str, Tensor], num_layers: int) -> Published:
    """Read a head of either layout; which tensors it should have is for the caller to say.

    Args:
        config: its config.json.
        tensors: of its files, left as they are.
        num_layers: of the target, for a head that does not name its taps.

    Raises:
        ValueError: the config is of neither layout, asks for something that is not supported, or lacks a size.
    """
    layer, head = _settings(config)
    for key, wanted in UNSUPPORTED.items():
        if (got := head.get(key, wanted)) not in (wanted, None):
            raise ValueError(f"config.json has {key} {got!r}; only {wanted!r} is supported")
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(layer.get(key), int):
            raise ValueError(f"config.json has {key} {layer.get(key)!r}; wanted a number")
    if head.get("target_hidden_size") not in (None, layer["hidden_size"]):
        raise ValueError(f"target_hidden_size {head['target_hidden_size']} is not hidden_size {layer['hidden_size']}")
    return Published(
        layer=LlamaConfig(**{key: value for key, value in layer.items() if key != "architectures"}),
        draft_vocab_size=head.get("draft_vocab_size") or layer["vocab_size"],
        taps=_taps(head, num_layers),
        norm_before_residual=bool(head["norm_before_residual"]),
        tensors=_native_names(tensors),
    )


def _settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the layer's settings, and all settings of the head in one table."""
    if (kind := config.get("speculators_model_type")) is not None:
        layer = config.get("transformer_layer_config")
        if not is_published(config) or not isinstance(layer, dict):
            raise ValueError(
                f"speculators_model_type is {kind!r} with transformer_layer_config {type(layer).__name__}; "
                "wanted 'eagle3' with a table"
            )
        own = {key: value for key, value in config.items() if key not in ("transformer_layer_config", "architectures")}
        head = {**layer, "norm_before_residual": True, **own}
    else:
        if not is_published(config):
            raise ValueError(
                f"config.json has architectures {config.get('architectures')} "
                f"and draft_vocab_size {config.get('draft_vocab_size')}; "
                f"wanted an EAGLE-3 head: {' or '.join(NATIVE)} with draft_vocab_size, or speculators_model_type eagle3"
            )
        layer = dict(config)
        nested = dict(config.get("eagle_config") or {})
        if config.get(TAPS):
            nested.pop(TAPS, None)
        head = {"norm_before_residual": False, **config, **nested}
    if (model_type := layer.get("model_type", "llama")) != "llama":
        raise ValueError(f"the head's layer is of model_type {model_type!r}; only 'llama' is supported")
    if config.get("quantization_config") or layer.get("quantization_config"):
        raise ValueError("the head is quantized; wanted its weights in 16 or 32 bits")
    return layer, head


def _taps(head: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    named = head.get(TAPS)
    taps = sorted(named or (2, num_layers // 2, num_layers - 3))
    if len(set(taps)) < len(taps) or not 0 <= taps[0] <= taps[-1] <= num_layers:
        which = "names" if named else "names none, so the engine would take"
        raise ValueError(f"{TAPS} {which} {taps}; wanted different layers of 0 to {num_layers}")
    return tuple(taps)


def _native_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the layer's tensors and leave out `t2d`, which says what `d2t` says; floats become bfloat16."""
    native: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == "t2d":
            continue
        for prefix in LAYER_NAMES:
            if name.startswith(prefix):
                name = LAYER_NAMES[0] + name.removeprefix(prefix)
        if name in native:
            raise ValueError(f"tensor {name} is there twice, under both layouts' names")
        native[name] = tensor.to(torch.bfloat16 if tensor.is_floating_point() else torch.int64)
    return native
