"""EAGLE-3: one decoder layer that drafts from the target's own hidden states, made, kept and checked.

The module itself is in `models.core.drafting.eagle3_heads`, what others publish in `layouts`. `publish` writes that
of `speculators`, which vLLM serves together with the target that it names (https://docs.vllm.ai/projects/speculators).
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from models.core.checkpoints.loading import read_stored
from models.core.checkpoints.readout import Readout, input_embedding, output_embedding
from models.core.drafting.draft_families import read_json
from models.core.drafting.draft_format import WEIGHTS, check_made_for
from models.core.drafting.eagle3_heads import (
    Eagle3,
    Format,
    HeadParams,
    engine_weights,
    is_subset,
    start_from_last_layer,
    tapping,
)
from models.core.drafting.features import layer_config
from models.drafts.eagle3.layouts import (
    LAYER_NAMES,
    NORMS,
    TAPS,
    Published,
    is_published,
    padded_as,
    read_published,
    with_offsets,
)
from models.targets import TargetCard, describe, differing_tokens, num_ids, target_config

PAPER = "arXiv:2503.01840"
SERVED = True
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM")
# What the layout keeps outside of the layer's settings, or not at all.
APART = ("architectures", "draft_vocab_size", *NORMS, "redraft", TAPS)


class Params(HeadParams):
    """Shape of a new head."""

    name: Literal["eagle3"] = "eagle3"


_format = Format("eagle3", ARCHITECTURES, Eagle3, start_from_last_layer)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
expected_shapes, publishes, vllm_weights = _format.expected_shapes, is_published, engine_weights
require_target = _format.require_target


def adopt(directory: Path, target_dir: Path) -> Eagle3:
    """Take a head that somebody else trained, in a layout of `layouts`.

    A tokenizer.json beside its config.json and safetensors files must have the target's tokens; if both have the same,
    the vocabularies may differ in their padding. Of a head that can say every token, output matrix and norm are the
    target's where it has none. ValueError if the head was made for another target as far as its files tell, is of a
    shape that is not supported, a tensor is missing, extra, of another shape or not finite, or its maps of tokens
    contradict each other; names what does not fit.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    if not list(directory.glob("*.safetensors")) and (pickled := sorted(directory.glob("*.bin"))):
        raise ValueError(f"{pickled[0]} is a pickle, which could run code; wanted safetensors files")
    published = read_json(directory / "config.json")
    target = describe(target_dir)
    check_made_for(published, directory, target)
    head = read_published(published, read_stored(directory), target.num_layers)
    if head.layer.hidden_size != target.hidden_size:
        raise ValueError(f"the head has hidden_size {head.layer.hidden_size}, the target has {target.hidden_size}")
    head = _of_targets_tokens(head, target, directory, target_dir)
    tensors = with_offsets(head.tensors, target.vocab_size)
    own = tensors.pop("embed_tokens.weight", None)
    if own is not None and not torch.equal(own, input_embedding(target_dir).to(own.dtype)):
        raise ValueError(
            "tensor embed_tokens.weight is not the target's; a head with an embedding of its own is not supported"
        )
    config = _config(head, target_dir)
    if not is_subset(config):
        if not tensors.get("d2t", torch.zeros(1)).any():
            tensors.pop("d2t", None)
        if "lm_head.weight" not in tensors:
            tensors["lm_head.weight"] = output_embedding(target_dir).bfloat16()
        if "norm.weight" not in tensors:
            tensors["norm.weight"] = Readout.load(target_dir, rows=torch.zeros(1, dtype=torch.long)).gain.bfloat16()
    _format.require_fit(tensors, config)
    adopted = Eagle3(config).borrow(target_dir)
    adopted.load_state_dict(tensors)
    return adopted


def context(directory: Path) -> int | None:
    config = read_json(directory / "config.json")
    layer: dict[str, Any] = config.get("transformer_layer_config", config)
    return layer.get("max_position_embeddings")


def readings(draft: Eagle3, directory: Path, target_dir: Path) -> dict[str, Eagle3]:
    """See `models.drafts.Adopter`: by the layers that it may read. All share one head's weights."""
    head = read_published(read_json(directory / "config.json"), read_stored(directory), describe(target_dir).num_layers)
    found = {}
    for taps in head.readings:
        found[f"layers {', '.join(map(str, taps))}"] = other = copy.copy(draft)
        other.config = draft.config | tapping(taps)
    return found


def publish(directory: Path, into: Path, target: Mapping[str, Any], num_draft_tokens: int) -> None:
    config, tensors = read_json(directory / "config.json"), load_file(directory / WEIGHTS)
    published = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
            "verifier": dict(target),
        },
        "transformer_layer_config": {key: value for key, value in config.items() if key not in APART},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["hidden_size"],
        "norm_before_residual": False,
        **{key: config[key] for key in NORMS if key in config},
        TAPS: config[TAPS],
        "dtype": config.get("dtype", "bfloat16"),
        "redraft": config["redraft"],
    }
    native, own = LAYER_NAMES
    renamed = {
        own + key.removeprefix(native) if key.startswith(native) else key: tensor for key, tensor in tensors.items()
    }
    if (offsets := tensors.get("d2t")) is not None:
        renamed["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
        renamed["t2d"][offsets + torch.arange(len(offsets))] = True
    save_file(renamed, into / WEIGHTS, metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(published, indent=2, sort_keys=True) + "\n")


def vllm_config(directory: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(directory)}


def _config(head: Published, target_dir: Path) -> dict[str, Any]:
    """Return the config.json of a published head, as vLLM and the heads here read it."""
    source, layer = target_config(target_dir), head.layer
    # Of no meaning for a head: with the target's, one of the same shape can be swapped in for it.
    for key in ("bos_token_id", "eos_token_id", "max_position_embeddings"):
        setattr(layer, key, getattr(source, key))
    own = {**layer_config(layer), "draft_vocab_size": head.draft_vocab_size, **tapping(head.readings[0]), **head.norms}
    if layer.attention_bias:
        own["attention_bias"] = True
    if layer.model_type == "qwen3":
        own |= {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    return _format.config(own, target_dir)


def _of_targets_tokens(head: Published, target: TargetCard, directory: Path, target_dir: Path) -> Published:
    """Return a head whose vocabulary is as long as the target's, padding included; ValueError if tokens differ."""
    known = all((one / "tokenizer.json").is_file() for one in (directory, target_dir))
    if known and (differing := differing_tokens(directory, target_dir)):
        raise ValueError(
            f"the head's tokenizer is not the target's: {len(differing)} tokens differ, such as {differing[0]!r}"
        )
    sizes = head.layer.vocab_size, target.vocab_size
    if sizes[0] == sizes[1]:
        return head
    told = f"the head has vocab_size {sizes[0]}, the target has {sizes[1]}"
    if not known:
        raise ValueError(f"{told}; the target's tokenizer.json beside the head would tell whether that is padding")
    if (num := num_ids(target_dir)) > min(sizes):
        raise ValueError(f"{told}, and their tokenizer has {num} tokens")
    return padded_as(head, input_embedding(target_dir), output_embedding(target_dir))
