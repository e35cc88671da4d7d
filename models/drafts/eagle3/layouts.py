"""The layouts that EAGLE-3 heads are published in, brought to one.

Two are read, as vLLM's loader reads them (model_executor/models/llama_eagle3.py and qwen3_eagle3.py,
transformers_utils/configs/speculators):

- native, of the original repositories: a flat config, whose architecture says of which kind the layer is, tensors
  `midlayer.*`;
- `speculators`: the layer's settings in `transformer_layer_config` and the head's beside it, tensors `layers.0.*`.

vLLM maps the tensors' names in both alike. What it assumes where a config is silent differs: a speculators head norms
before the residual, a native one after. Taps are fed in ascending order, whatever order they are named in.

A vocabulary may be padded beyond its tokenizer's tokens, and otherwise than the target's (`padded_as`).

Three things mean two things, and vLLM takes one of them. `d2t` holds offsets or the target's ids themselves; the mask
`t2d`, which vLLM never reads, tells which. Layers are named as they are counted here or, by what was trained for SGLang
(`eagle_config`), by the number of the layer whose output is read. Where none are named vLLM takes (2, n // 2, n − 3) of
n. So a head has several readings, and what it drafts of the target's own text tells which is right.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

# Kind of layer to its settings, and architecture to the kind of its layer. The last one is what the first heads called
# themselves, and a language model without the key that names a vocabulary of its own.
LAYERS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
NATIVE = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
}
LAYER_NAMES = ("midlayer.", "layers.0.")
TAPS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"
# Keys that name layers, and what is added to be counted as layers done.
NAMES_TAPS = {TAPS: 0, "aux_hidden_state_layer_ids": 0, "layer_ids": 0, "target_layer_ids": 1}
# What is of no meaning for one layer alone.
NOT_THE_LAYERS = ("architectures", "layer_types")
# Where a head norms, each False where a config is silent; see `models.core.drafting.eagle3_heads`.
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# What vLLM knows of a head and the heads here do not have: setting to the value that leaves it out.
UNSUPPORTED = {
    "mlp_bias": False,
    "bias": False,
    "is_causal": True,
    "dual_chunk_attention_config": None,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
}


class Published(NamedTuple):
    layer: PreTrainedConfig  # the shape of its one decoder layer, Llama's or Qwen3's
    draft_vocab_size: int  # D, the target's vocabulary size where the config names none
    readings: tuple[tuple[int, ...], ...]  # what it may tap, counted as layers done, ascending; first what vLLM takes
    norms: dict[str, bool]  # those of `NORMS` that it has, as a config says it
    tensors: dict[str, Tensor]  # by native names, floats in bfloat16; `d2t` and `t2d` as they are (`with_offsets`)


def is_published(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is a head's, of either layout."""
    if (kind := config.get("speculators_model_type")) is not None:
        return bool(kind == "eagle3")
    named = config.get("architectures")
    return named in [[name] for name in NATIVE] and (named != ["LlamaForCausalLM"] or "draft_vocab_size" in config)


def read_published(config: Mapping[str, Any], tensors: Mapping[str, Tensor], num_layers: int) -> Published:
    """Read a head of either layout; which tensors it should have is for the caller to say.

    `num_layers` is of the target, for a head that does not name its taps. ValueError if the config is of neither
    layout, asks for something that is not supported, lacks a size or names layers in two ways that differ.
    """
    layer, head = _settings(config)
    for key, wanted in UNSUPPORTED.items():
        if (got := head.get(key, wanted)) not in (wanted, None):
            raise ValueError(f"config.json has {key} {got!r}; only {wanted!r} is supported")
    if "sliding_attention" in (head.get("layer_types") or ())[:1]:
        raise ValueError("the head's layer has sliding-window attention; only full attention is supported")
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(layer.get(key), int):
            raise ValueError(f"config.json has {key} {layer.get(key)!r}; wanted a number")
    if head.get("target_hidden_size") not in (None, layer["hidden_size"]):
        raise ValueError(f"target_hidden_size {head['target_hidden_size']} is not hidden_size {layer['hidden_size']}")
    return Published(
        layer=LAYERS[layer["model_type"]](**{key: value for key, value in layer.items() if key not in NOT_THE_LAYERS}),
        draft_vocab_size=head.get("draft_vocab_size") or layer["vocab_size"],
        readings=_readings(config, tensors, layer["hidden_size"], num_layers),
        norms={key: True for key in NORMS if head.get(key)},
        tensors=_native_names(tensors),
    )


def with_offsets(tensors: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Return a head's tensors with offsets in `d2t`, checked against `t2d`, which is left out; ValueError if `d2t` is
    not what `t2d` says, or what it holds can't be told."""
    tensors = dict(tensors)
    mask, said = tensors.pop("t2d", None), tensors.get("d2t")
    if said is None:
        return tensors
    ids = said + torch.arange(len(said))
    if mask is None:
        if len(said) > 1 and bool((said.diff() > 0).all()) and int(ids[-1]) < vocab_size:
            raise ValueError("d2t may hold the target's ids or offsets to them, and there is no t2d that tells which")
        return tensors
    if mask.shape != (vocab_size,) or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"t2d is {list(mask.shape)} up to {mask.max():g}; wanted 0 or 1 for {vocab_size} tokens")
    told = mask.nonzero()[:, 0]
    if not torch.equal(ids.sort().values, told):
        if not torch.equal(said.sort().values, told):
            of_offsets, of_ids = (int(torch.isin(read, told).sum()) for read in (ids, said))
            raise ValueError(
                f"d2t and t2d contradict each other: t2d marks {len(told)} tokens, d2t names {len(said)}, "
                f"{of_offsets} of them if it holds offsets, {of_ids} if ids"
            )
        tensors["d2t"] = said - torch.arange(len(said))
    return tensors


def padded_as(head: Published, embedding: Tensor, output: Tensor) -> Published:
    """Cut or fill what a head has of each token, so that its vocabulary is as long as its target's.

    `embedding` and `output` [V, H] are the target's matrices: a token that the head lacks gets their rows. Tokens that
    are cut must be padding, which is for the caller to know.
    """
    own, size, tensors = head.layer.vocab_size, len(output), dict(head.tensors)
    whole = head.draft_vocab_size == own
    rows = {"embed_tokens.weight": embedding, "t2d": torch.zeros(size)}
    rows |= {"lm_head.weight": output, "d2t": torch.zeros(size)} if whole else {}
    for name in rows.keys() & tensors.keys():
        tensors[name] = torch.cat([tensors[name][:size], rows[name][own:].to(tensors[name].dtype)])
    head.layer.vocab_size = size
    return head._replace(tensors=tensors, draft_vocab_size=size if whole else head.draft_vocab_size)


def _settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if (kind := config.get("speculators_model_type")) is not None:
        layer = config.get("transformer_layer_config")
        if not is_published(config) or not isinstance(layer, dict):
            raise ValueError(
                f"speculators_model_type is {kind!r} with transformer_layer_config {type(layer).__name__}; "
                "wanted 'eagle3' with a table"
            )
        layer = {"model_type": "llama", **layer}
        own = {key: value for key, value in config.items() if key not in ("transformer_layer_config", "architectures")}
        head = {**layer, "norm_before_residual": True, **own}
    else:
        if not is_published(config):
            raise ValueError(
                f"config.json has architectures {config.get('architectures')} "
                f"and draft_vocab_size {config.get('draft_vocab_size')}; "
                f"wanted an EAGLE-3 head: {' or '.join(NATIVE)}, the last one with draft_vocab_size, "
                "or speculators_model_type eagle3"
            )
        [architecture] = config["architectures"]
        layer = {"model_type": NATIVE[architecture], **config}
        if layer["model_type"] != NATIVE[architecture]:
            raise ValueError(
                f"config.json has model_type {layer['model_type']!r}; the layer of architecture {architecture} is of "
                f"{NATIVE[architecture]!r}"
            )
        head = {**config, **(config.get(NESTED) or {})}
    if layer["model_type"] not in LAYERS:
        raise ValueError(
            f"the head's layer is of model_type {layer['model_type']!r}; only {' and '.join(LAYERS)} are supported"
        )
    if config.get("quantization_config") or layer.get("quantization_config"):
        raise ValueError("the head is quantized; wanted its weights in 16 or 32 bits")
    return layer, head


def _readings(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], hidden_size: int, num_layers: int
) -> tuple[tuple[int, ...], ...]:
    flat, nested = (_named(table) for table in (config, config.get(NESTED) or {}))
    first = next(iter(flat.values()), ())
    if len(set(flat.values())) > 1 or (flat and {*nested.values()} - {first, tuple(tap - 1 for tap in first)}):
        told = ", ".join(f"{key} {list(taps)}" for key, taps in [*flat.items(), *nested.items()])
        raise ValueError(f"config.json names different layers, counted as layers done: {told}; take out what is wrong")
    if flat:
        found = [first]
    elif nested:
        found = [other for taps in nested.values() for other in (taps, tuple(tap + 1 for tap in taps))]
    else:
        width = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else 3 * hidden_size
        found = _usual(num_layers, max(1, width // hidden_size))
    fitting = [taps for taps in dict.fromkeys(found) if _fits(taps, num_layers)]
    if not fitting:
        which = "names" if flat or nested else "names none, so the engine would take"
        raise ValueError(f"{TAPS} {which} {list(found[0])}; wanted different layers of 0 to {num_layers}")
    return tuple(fitting)


def _named(table: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    given = {key: table[key] for key in NAMES_TAPS if table.get(key)}
    for key, ids in given.items():
        if not isinstance(ids, list) or any(type(one) is not int for one in ids):
            raise ValueError(f"config.json has {key} {ids!r}; wanted a list of numbers")
    return {key: tuple(sorted(one + NAMES_TAPS[key] for one in ids)) for key, ids in given.items()}


def _fits(taps: tuple[int, ...], num_layers: int) -> bool:
    return len(set(taps)) == len(taps) and 0 <= taps[0] <= taps[-1] <= num_layers


def _usual(num_layers: int, num_taps: int) -> list[tuple[int, ...]]:
    """Return what heads read whose config is silent: near both ends and between, one layer off, or equal parts."""
    spread: tuple[int, ...]
    if num_taps == 3:
        spread = (2, num_layers // 2, num_layers - 3)
    else:
        spread = tuple(round(2 + (num_layers - 5) * place / max(1, num_taps - 1)) for place in range(num_taps))
    off = [tuple(tap + more for tap in spread) for more in (0, 1, -1)]
    parts = tuple(max(1, place * num_layers // num_taps) for place in range(1, num_taps + 1))
    return [*off, parts]


def _native_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the layer's tensors; floats become bfloat16."""
    native: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for prefix in LAYER_NAMES:
            if name.startswith(prefix):
                name = LAYER_NAMES[0] + name.removeprefix(prefix)
        if name in native:
            raise ValueError(f"tensor {name} is there twice, under both layouts' names")
        native[name] = tensor.to(torch.bfloat16 if tensor.is_floating_point() else torch.int64)
    return native
