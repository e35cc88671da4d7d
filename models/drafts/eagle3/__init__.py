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
from transformers import AutoConfig

from models.core.checkpoints.checkpoint import read_stored
from models.core.checkpoints.readout import input_embedding
from models.core.drafting.draft_files import WEIGHTS, check_made_for, read_json
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
from models.drafts.eagle3.layouts import LAYER_NAMES, TAPS, is_published, read_published, with_offsets
from models.targets import describe
from models.tokens import differing_tokens

PAPER = "arXiv:2503.01840"
TRAINED = True
SERVED = True
ARCHITECTURES = ("LlamaForCausalLMEagle3",)
# What the layout keeps outside of the layer's settings, or not at all.
APART = ("architectures", "draft_vocab_size", "norm_before_residual", "redraft", TAPS)


class Params(HeadParams):
    """Shape of a new head."""

    name: Literal["eagle3"] = "eagle3"


_format = Format("eagle3", ARCHITECTURES, Eagle3, start_from_last_layer)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
expected_shapes, publishes, vllm_weights = _format.expected_shapes, is_published, engine_weights


def adopt(directory: Path, target_dir: Path) -> Eagle3:
    """Take a head that somebody else trained, in a layout of `layouts`.

    A tokenizer.json beside its config.json and safetensors files must have the target's tokens. ValueError if the head
    was made for another target as far as its files tell, is of a shape that is not supported, a tensor is missing,
    extra, of another shape or not finite, or its maps of tokens contradict each other; names what does not fit.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    if not list(directory.glob("*.safetensors")) and (pickled := sorted(directory.glob("*.bin"))):
        raise ValueError(f"{pickled[0]} is a pickle, which could run code; wanted safetensors files")
    published = read_json(directory / "config.json")
    target, source = describe(target_dir), AutoConfig.from_pretrained(target_dir)
    check_made_for(published, directory, target)
    head = read_published(published, read_stored(directory), target.num_layers)
    for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if (got := getattr(head.layer, key)) != wanted:
            raise ValueError(f"the head has {key} {got}, the target has {wanted}")
    _require_same_tokens(directory, target_dir)
    tensors = with_offsets(head.tensors, target.vocab_size)
    own = tensors.pop("embed_tokens.weight", None)
    if own is not None and not torch.equal(own, input_embedding(target_dir).to(own.dtype)):
        raise ValueError(
            "tensor embed_tokens.weight is not the target's; a head with an embedding of its own is not supported"
        )
    # Of no meaning for a head: with the target's, one of the same shape can be swapped in for it.
    for key in ("bos_token_id", "eos_token_id", "max_position_embeddings"):
        setattr(head.layer, key, getattr(source, key))
    shape = {**layer_config(head.layer), "draft_vocab_size": head.draft_vocab_size, **tapping(head.readings[0])}
    config = _format.config(shape, target_dir)
    if head.norm_before_residual:
        config["norm_before_residual"] = True
    if not is_subset(config) and not tensors.get("d2t", torch.zeros(1)).any():
        tensors.pop("d2t", None)
    _format.require_fit(tensors, config)
    adopted = Eagle3(config).borrow(target_dir)
    adopted.load_state_dict(tensors)
    return adopted


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
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
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


def _require_same_tokens(directory: Path, target_dir: Path) -> None:
    if not all((one / "tokenizer.json").is_file() for one in (directory, target_dir)):
        return
    if differing := differing_tokens(directory, target_dir):
        raise ValueError(
            f"the head's tokenizer is not the target's: {len(differing)} tokens differ, such as {differing[0]!r}"
        )
