"""A draft's directory: its config.json, which says family and target, and what its tensors must be."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from models.params import BaseParams, validate
from models.targets import MODEL_TYPES, TargetCard

WEIGHTS = "model.safetensors"
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
# What vLLM's layers of the Llama kind keep as one matrix, in its order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def read_config(directory: Path, family: str, architectures: Sequence[str]) -> dict[str, Any]:
    """Read a draft's config.json.

    Raises:
        ValueError: it can't be read, or is of another family or of another architecture than the family's.
    """
    config = read_json(directory / "config.json")
    named = own(config, directory).get("family", family)
    if named != family:
        raise ValueError(f"draft {directory.name} is of family {named!r}; wanted {family!r}")
    if config.get("architectures") not in [[architecture] for architecture in architectures]:
        raise ValueError(
            f"draft {directory.name} is of architecture {config.get('architectures')}; "
            f"wanted {' or '.join(architectures)}"
        )
    return config


def write_config(config: Mapping[str, Any], family: str, directory: Path) -> None:
    """Write a draft's config.json, which says its family."""
    kept = {**config, "redraft": {**config.get("redraft", {}), "family": family}}
    (directory / "config.json").write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError if it can't be read or is something else."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"draft {file.parent.name}: {file.name} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"draft {file.parent.name}: {file.name} holds a {type(value).__name__}, wanted an object")
    return value


def read_vocabulary(directory: Path) -> frozenset[int] | None:
    """Return the target's token ids that a draft can say, None where its files name no part of the vocabulary."""
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = set(tensors.keys())
            if "token_map" in names:
                return frozenset(tensors.get_tensor("token_map").tolist())
            if "d2t" in names:
                offsets = tensors.get_tensor("d2t")
                return frozenset((offsets + torch.arange(len(offsets))).tolist())
    return None


def check_config(config: dict[str, Any], directory: Path, like: dict[str, Any] | None, target: TargetCard) -> None:
    """Raise ValueError if a draft is not the target's, or can't be swapped in for the one of config `like`."""
    check_made_for(config, directory, target)
    if config.get("vocab_size") != target.vocab_size:
        raise ValueError(
            f"draft {directory.name} has vocab_size {config.get('vocab_size')}, the target has {target.vocab_size}"
        )
    if like is not None:
        keys = (config.keys() | like.keys()) - {"redraft"}
        if changed := sorted(key for key in keys if config.get(key) != like.get(key)):
            raise ValueError(
                f"draft {directory.name} differs from the served draft in {', '.join(changed)}; a swap can't change it"
            )


def check_made_for(config: dict[str, Any], directory: Path, target: TargetCard) -> None:
    """Raise ValueError if a draft says that it was made for another target; one from elsewhere says nothing."""
    made_for = own(config, directory)
    for key, served in (("target_sha256", target.sha256), ("tokenizer_sha256", target.tokenizer_sha256)):
        if key in made_for and made_for[key] != served:
            raise ValueError(
                f"draft {directory.name} was made for {key} {made_for[key][:12]}…, the target has {served[:12]}…"
            )


def require_tensors(tensors: dict[str, Tensor], wanted: Shapes) -> None:
    """Raise ValueError naming a tensor that is missing, extra, of another shape or dtype, or not finite."""
    for name in sorted(wanted.keys() - tensors.keys()):
        raise ValueError(f"tensor {name} is missing")
    for name in sorted(tensors.keys() - wanted.keys()):
        raise ValueError(f"tensor {name} is not one of this draft's")
    for name, (shape, dtype) in wanted.items():
        got = tensors[name]
        if tuple(got.shape) != shape or got.dtype != dtype:
            raise ValueError(f"tensor {name} is {got.dtype} {list(got.shape)}; wanted {dtype} {list(shape)}")
        if got.is_floating_point() and not bool(torch.isfinite(got).all()):
            raise ValueError(f"tensor {name} holds NaN or infinite values")


def require_llama_layout(model_type: str, family: str) -> None:
    """Raise ValueError if a family can't read a target's layers and norms."""
    if model_type not in MODEL_TYPES:
        raise ValueError(f"{family} reads targets of Llama's layout, {', '.join(MODEL_TYPES)}; got {model_type!r}")


def require_vocabulary(name: str, token_ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless what tensor `name` lets a draft say, [D] target ids, ascends within 0 to V − 1."""
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size or not bool((token_ids.diff() > 0).all()):
        raise ValueError(
            f"{name} must name ascending tokens of 0 to {vocab_size - 1}; "
            f"got {int(token_ids.min())} to {int(token_ids.max())}"
        )


def require_whole_vocabulary(family: str, size: int, vocab_size: int) -> None:
    """Raise ValueError unless a draft's `size` tokens are all of the target's, as in vLLM's drafts of such a family."""
    if size != vocab_size:
        raise ValueError(
            f"vLLM's drafts of family {family} say every token of the target's {vocab_size or 'vocabulary'}, this one "
            f'{size}: set vocab_size = 0 in [draft], or engine "torch"'
        )


def require_vocab_size(size: int, vocab_size: int) -> None:
    """Raise ValueError if a new draft is to say more tokens than the target's `vocab_size`, or none."""
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft vocab_size must be 1 to {vocab_size}, the target's; got {size}")


def read_params(config: Mapping[str, Any], family: str, params: type[BaseParams], directory: Path) -> Any:
    """Return the settings that a draft's config keeps under its family's name; ValueError if there are none such."""
    table = config.get(family)
    if not isinstance(table, dict):
        raise ValueError(f'draft {directory.name}: config.json has "{family}" {table!r}; wanted its settings')
    return validate(params, table, f"draft {directory.name}")


def made_for(target: TargetCard) -> dict[str, str]:
    """Return what a draft's config keeps of its target under "redraft"."""
    return {"target_sha256": target.sha256, "tokenizer_sha256": target.tokenizer_sha256}


def fused(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Stack tensors as vLLM's layers of the Llama kind do; return each parameter's name with its tensors in order.

    `names` are those that parameters would have in vLLM if nothing were stacked, with the checkpoint's tensor.
    """
    whole_of = {part: whole for whole, parts in FUSED.items() for part in parts}
    parameters = {}
    for name, tensor in names.items():
        place, _, leaf = name.rpartition(".")
        layer, _, linear = place.rpartition(".")
        if whole := whole_of.get(linear):
            stacked = (names.get(f"{layer}.{part}.{leaf}") for part in FUSED[whole])
            parameters[f"{layer}.{whole}.{leaf}"] = tuple(part for part in stacked if part is not None)
        else:
            parameters[name] = (tensor,)
    return parameters


def own(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """Return what a draft's config says under "redraft", nothing in one from elsewhere."""
    own = config.get("redraft", {})
    if not isinstance(own, Mapping):
        raise ValueError(f"draft {directory.name}: config.json has redraft {own!r}; wanted an object")
    return own
