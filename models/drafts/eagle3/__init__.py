"""EAGLE-3: one decoder layer that drafts from the target's own hidden states, made, kept and checked.

The module itself is in `models.core.drafting.eagle3_heads`, what others publish in `layouts`.
"""

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from models.core.checkpoints.checkpoint import read_stored, read_tensor
from models.core.drafting.draft_files import check_made_for, read_json
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
from models.drafts.eagle3.export import publish as publish
from models.drafts.eagle3.layouts import is_published, read_published, with_offsets
from models.targets import describe
from models.tokens import differing_tokens

PAPER = "arXiv:2503.01840"
TRAINED = True
SERVED = True
FAMILY = "eagle3"
ARCHITECTURES = ("LlamaForCausalLMEagle3",)


class Params(HeadParams):
    """Shape of a new head."""

    name: Literal["eagle3"] = "eagle3"


_format = Format(FAMILY, ARCHITECTURES, Eagle3, start_from_last_layer)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
expected_shapes, publishes, vllm_weights = _format.expected_shapes, is_published, engine_weights


def adopt(directory: Path, target_dir: Path) -> Eagle3:
    """Take a head that somebody else trained, in a layout of `layouts`.

    Args:
        directory: config.json and safetensors files; a tokenizer.json beside them must have the target's tokens.
        target_dir: the target that it is to draft for.

    Raises:
        ValueError: the head was made for another target as far as its files tell, is of a shape that is not supported,
            a tensor is missing, extra, of another shape or not finite, or its maps of tokens contradict each other;
            names what does not fit.
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
    if own is not None and not torch.equal(own, read_tensor(target_dir, "model.embed_tokens.weight").to(own.dtype)):
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


def vllm_config(directory: Path) -> dict[str, Any]:
    """Return what vLLM's speculative_config says of this draft."""
    return {"method": "eagle3", "model": str(directory)}


def _require_same_tokens(directory: Path, target_dir: Path) -> None:
    """Raise ValueError if a head brings a tokenizer that is not the target's."""
    if not all((one / "tokenizer.json").is_file() for one in (directory, target_dir)):
        return
    if differing := differing_tokens(directory, target_dir):
        raise ValueError(
            f"the head's tokenizer is not the target's: {len(differing)} tokens differ, such as {differing[0]!r}"
        )
